"""Where a server is: its address for others, and the file that tells it as long as requests are answered."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_rl.files import write_atomic

log = logging.getLogger(__name__)


def url_of(host: str, port: int) -> str:
    """How others reach it: an address that means all interfaces is replaced by the name of this machine."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def local_url(host: str, port: int) -> str:
    """How this machine reaches it."""
    return url_of({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


@contextmanager
def published(file: str | None, url: str, model: str) -> Iterator[None]:
    """Within the block `file`, if there is one, holds address, process and model; that of a successor stays."""
    log.info("engine ready at %s, model %s", url, model)
    if file is None:
        yield
        return
    path = write_atomic(Path(file), json.dumps({"url": url, "pid": os.getpid(), "model": model}))
    try:
        yield
    finally:
        with suppress(FileNotFoundError, ValueError, KeyError):
            if json.loads(path.read_text())["pid"] == os.getpid():
                path.unlink()
