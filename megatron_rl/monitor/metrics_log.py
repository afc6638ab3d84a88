"""metrics.jsonl, the record of a run: appending rows, reading them back, cutting them at a restored step.

One row is one step; the rows of the supervised warm-up stand at step 0 and carry their own counter in `sft/step`. What
a crash leaves behind is at most a torn last line: reading ignores it and the next opening removes it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from megatron_rl.files import regular, write_atomic

from .metrics import MetricValue

METRICS_FILE = "metrics.jsonl"
SFT_STEP = "sft/step"
_log = logging.getLogger(__name__)


class MetricsFileError(ValueError):
    """A metrics file with a damaged line that is not merely a torn last one."""


class MetricsLog:
    """RUN/metrics.jsonl: one JSON object a row, keys `step`, `time` (seconds since 1970) and the metrics; null = NaN.

    Rows are appended and flushed one by one, so that `tail -f` and a report see them at once.
    """

    def __init__(self, path: str | Path) -> None:
        """Open for appending, creating folders as needed. Raises OSError when the file cannot be written."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(self.path)
        self._file = self.path.open("ab")

    def write(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Append one row; NaN and infinities become null."""
        row = {"step": step, "time": round(time.time(), 3), **metrics}
        self._file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Keep only rows with `row.step <= step` (atomic). Raises MetricsFileError for a damaged file."""
        rows = read_metrics(self.path)
        kept = [row for row in rows if row["step"] <= step]
        if len(kept) == len(rows):
            return
        _log.info("%s: dropped %d rows beyond step %d", self.path, len(rows) - len(kept), step)
        self._file.close()
        write_atomic(self.path, b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in kept))
        self._file = self.path.open("ab")

    def close(self) -> None:
        """Flush to the disk itself and close."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All rows in file order; a torn last line is ignored, a missing file has none.

    Raises MetricsFileError naming file and line when any other line is not a JSON object with an integer `step`.
    """
    path = Path(path)
    *lines, tail = _content(path).split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _parse_row(line)
        if row is not None:
            rows.append(row)
        elif line.strip() and not (number == len(lines) and not tail):
            raise MetricsFileError(f"{path}:{number}: not a metrics row; remove this line to go on without it")
    last = _parse_row(tail)
    return [*rows, last] if last is not None else rows


def _content(path: Path) -> bytes:
    try:
        return regular(path).read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise MetricsFileError(f"{path}: cannot be read ({error})") from error


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _drop_torn_line(path: Path) -> None:
    """Make the file end with a whole line; a last row that only lacks its newline is kept."""
    content = _content(path)
    head, newline, tail = content.rpartition(b"\n")
    if not tail:
        return
    _log.warning("%s: the last line was torn by an earlier end of the run", path)
    whole = content + b"\n" if _parse_row(tail) is not None else head + newline
    write_atomic(path, whole)
