"""Where a server is: a free port, its URL, and the file that tells it. For every room.

RUN/endpoints/engine-<replica>.json     of an engine, as long as it answers
"""

from __future__ import annotations

import json
import logging
import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_rl.files import write_atomic

log = logging.getLogger(__name__)
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST, TRIES = 20000, 100


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now, and that the system gives to nobody before it is used.

    Below the range from which the system takes the ports of outgoing connections and of `bind(0)`: a port out of that
    range, free when it was looked at, is the far end of somebody's connection a moment later on a busy machine.

    Raises:
        OSError: none of `TRIES` ports could be bound.
    """
    above = _first_ephemeral()
    dice = random.SystemRandom()
    error = OSError(f"no free port between {LOWEST} and {above} on {host}")
    for _ in range(TRIES):
        with socket.socket(family_of(host)) as probe:
            try:
                probe.bind((host, dice.randrange(LOWEST, above)))
            except OSError as refused:
                error = refused
                continue
            return int(probe.getsockname()[1])
    raise error


def _first_ephemeral() -> int:
    try:
        first = int(EPHEMERAL.read_text().split()[0])
    except OSError:  # not Linux: IANA's boundary
        first = 49152
    return first if first > LOWEST + TRIES else 65536


def family_of(host: str) -> socket.AddressFamily:
    """IPv6 for an address with colons."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


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
