"""Ports that another process will listen on; who publishes which address is not decided here."""

from __future__ import annotations

import random
import socket
from pathlib import Path

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
        with socket.socket() as probe:
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
