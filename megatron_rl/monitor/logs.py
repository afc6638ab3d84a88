"""Log lines that name role, rank and node, on the process's standard error; no metric and no display is made here.

A line reads `2026-01-31 12:00:00.123 WARNING trainer-3@node07 megatron_rl.policy.policy: message`, so that the files of
RUN/logs, into which launchers lead what their processes say, can be merged with `sort`.
"""

from __future__ import annotations

import logging
import socket
import sys
from typing import TextIO


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is at that moment: a live display replaces it to keep its lines below the log."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        raise AttributeError("this handler always writes to sys.stderr")


def setup_logging(role: str, rank: int, level: str = "INFO") -> None:
    """Send this process's log to stderr; calling it again replaces what it set up before.

    `level` applies to our own loggers; other packages are heard from WARNING on.
    """
    node = socket.gethostname().split(".")[0]
    line = f"%(asctime)s.%(msecs)03d %(levelname)-7s {role}-{rank}@{node} %(name)s: %(message)s"
    handler = _CurrentStderr()
    handler.setFormatter(logging.Formatter(line, "%Y-%m-%d %H:%M:%S"))
    root = logging.getLogger()
    root.handlers = [earlier for earlier in root.handlers if not isinstance(earlier, _CurrentStderr)]
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("megatron_rl").setLevel(level)
    logging.captureWarnings(True)
