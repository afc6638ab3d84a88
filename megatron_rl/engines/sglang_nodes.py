"""How the nodes of one replica find each other: by a file of the run directory. What they then do is SGLang's."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

from megatron_rl.files import write_atomic

from .server_process import ServerFailed
from .sglang_command import SglangOptions

POLL_S = 0.2


def head_address(options: SglangOptions) -> str:
    """HOST:PORT of the replica's first node: written to `head_file` there, awaited by the others.

    Raises:
        ServerFailed: the first node has not written it within `ready_timeout_s`.
    """
    path = Path(options.head_file)
    if options.node_rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            address = f"{socket.gethostname()}:{probe.getsockname()[1]}"
        write_atomic(path, json.dumps({"address": address}))
        return address
    deadline = time.monotonic() + options.ready_timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise ServerFailed(
                f"node {options.node_rank} of {options.nodes} waited {options.ready_timeout_s:g} s "
                f"(engine.ready_timeout_s) for {path} from the replica's first node; look at that node's log"
            )
        time.sleep(POLL_S)
    return str(json.loads(path.read_text())["address"])
