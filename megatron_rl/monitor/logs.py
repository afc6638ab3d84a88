"""Log lines that name role, node, rank and step, to RUN/logs and to the console; no metric and no display is made here.

A line reads `2026-01-31 12:00:00.123 WARNING trainer-3@node07 step=12 megatron_rl.policy.policy: message`, the same in
the file and on the console, so that the files of a run can be merged with `sort` and searched with `grep step=12`.
"""

from __future__ import annotations

import logging
import socket
import sys
from pathlib import Path
from typing import TextIO

PACKAGE = "megatron_rl"
_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(role)s-%(rank)s@%(node)s step=%(run_step)s %(name)s: %(message)s"
_DATE = "%Y-%m-%d %H:%M:%S"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class LogContext(logging.Filter):
    """Who is speaking, added to every record; set `.step` as the run advances (None prints as `-`)."""

    def __init__(self, role: str, rank: int, node: str) -> None:
        super().__init__()
        self.role, self.rank, self.node = role, rank, node
        self.step: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields of the format; never drops a record."""
        record.role, record.rank, record.node = self.role, self.rank, self.node
        record.run_step = "-" if self.step is None else self.step
        return True


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


def setup_logging(
    role: str,
    rank: int,
    run_dir: str | Path | None,
    level: str = "INFO",
    *,
    console_level: str | None = None,
    node: str | None = None,
) -> LogContext:
    """Send this process's log to RUN/logs/<role>-<rank>.log (appended) and to stderr; set `.step` of what returns.

    `level` applies to our own loggers; other packages are heard from WARNING on. The console shows INFO from rank 0 and
    WARNING from the other ranks unless `console_level` says otherwise. Without `run_dir` only the console is used.
    Calling it again replaces what it set up before. Raises ValueError for an unknown level, OSError for a directory
    that cannot be written.
    """
    own, console = (
        _level(level, "level"),
        _level(console_level or ("INFO" if rank == 0 else "WARNING"), "console_level"),
    )
    context = LogContext(role, rank, node or socket.gethostname().split(".")[0])
    handlers: list[logging.Handler] = [_CurrentStderr()]
    handlers[0].setLevel(console)
    if run_dir is not None:
        path = Path(run_dir) / "logs" / f"{role}-{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(path, encoding="utf-8"))
    root = logging.getLogger()
    _remove_ours(root)
    for handler in handlers:
        handler.addFilter(context)
        handler.setFormatter(logging.Formatter(_FORMAT, _DATE))
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(PACKAGE).setLevel(own)
    logging.captureWarnings(True)
    return context


def close_logging() -> None:
    """Remove and close the handlers of `setup_logging`; handlers of others stay."""
    _remove_ours(logging.getLogger())


def _remove_ours(root: logging.Logger) -> None:
    for handler in [handler for handler in root.handlers if any(isinstance(f, LogContext) for f in handler.filters)]:
        root.removeHandler(handler)
        handler.close()


def _level(name: str, argument: str) -> int:
    if name.upper() not in _LEVELS:
        raise ValueError(f"{argument}={name!r} is not a log level; choose one of {', '.join(_LEVELS)}")
    return logging.getLevelNamesMapping()[name.upper()]
