"""Reads what a run wrote into one plain object for the report; draws nothing and needs none of the files to be there.

A run in progress, an early crash and a finished run are all fine: what is missing stays empty, and what cannot be read
is named in `notes`, which the page shows. Only a folder that no run ever wrote to is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .metrics_log import METRICS_FILE, SFT_STEP, MetricsFileError, read_metrics
from .result import RunResult

_DUMP = re.compile(r"step-(\d+)\.parquet")


class ReportError(ValueError):
    """No report can be made of this directory. The message says why and what to do."""


@dataclass(frozen=True)
class Series:
    """One metric over steps; `y` holds None where the value was not finite."""

    x: list[int]
    y: list[float | None]

    def __bool__(self) -> bool:
        return any(value is not None for value in self.y)

    @property
    def first(self) -> float | None:
        """First finite value."""
        return next((value for value in self.y if value is not None), None)

    @property
    def last(self) -> float | None:
        """Last finite value."""
        return next((value for value in reversed(self.y) if value is not None), None)


@dataclass
class RunData:
    """Everything of a run that the report shows."""

    run_dir: Path
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    series: dict[str, Series] = field(default_factory=dict)
    """By metric name; `sft/...` over the steps of the warm-up, all others over RL steps (0 = before the first)."""
    started: float | None = None
    updated: float | None = None
    """Times of the first and the last row, seconds since 1970."""
    result: RunResult | None = None
    rollouts: dict[int, Path] = field(default_factory=dict)
    evaluations: dict[int, Path] = field(default_factory=dict)
    """Parquet dumps by step."""
    notes: list[str] = field(default_factory=list)

    def get(self, name: str) -> Series:
        """The series of a metric, empty when the run did not record it."""
        return self.series.get(name, Series([], []))

    @property
    def last_step(self) -> int:
        """Newest RL step that was recorded (0 before the first)."""
        return max((s.x[-1] for name, s in self.series.items() if s.x and not name.startswith("sft/")), default=0)


def read_run(run_dir: str | Path) -> RunData:
    """Read a run directory. Raises ReportError when it is none."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ReportError(f"{run_dir} is not a directory; give the run_dir of a run")
    if not any((run_dir / name).exists() for name in (METRICS_FILE, "config.yaml", "rollouts", "eval")):
        raise ReportError(
            f"{run_dir} is not the directory of a run: it holds neither {METRICS_FILE} nor config.yaml; give the "
            "run_dir that `megatron-rl train` printed"
        )
    data = RunData(run_dir)
    _read_config(data)
    _read_metrics(data)
    try:
        data.result = RunResult.read(run_dir)
    except ValueError as error:
        data.notes.append(str(error))
    data.rollouts = dumps(run_dir / "rollouts")
    data.evaluations = dumps(run_dir / "eval")
    return data


def _read_config(data: RunData) -> None:
    path = data.run_dir / "config.yaml"
    if not path.is_file():
        data.notes.append("config.yaml is missing, or no file, so settings are not shown")
        return
    data.config_text = path.read_text("utf-8", errors="replace")
    try:
        loaded = yaml.safe_load(data.config_text)
    except yaml.YAMLError as error:
        data.notes.append(f"config.yaml is not valid YAML: {error}")
        return
    data.config = loaded if isinstance(loaded, dict) else {}


def _read_metrics(data: RunData) -> None:
    try:
        rows = read_metrics(data.run_dir / METRICS_FILE)
    except MetricsFileError as error:
        data.notes.append(f"{error}; no charts are shown")
        return
    times = [row["time"] for row in rows if isinstance(row.get("time"), int | float)]
    data.started, data.updated = (times[0], times[-1]) if times else (None, None)
    points: dict[str, dict[int, float | None]] = {}
    sft_rows = 0
    for row in rows:
        is_sft = any(name.startswith("sft/") for name in row)
        sft_rows += is_sft
        sft_step = int(row.get(SFT_STEP) or sft_rows)
        for name, value in row.items():
            if "/" in name and (value is None or isinstance(value, int | float)):
                # A later row of the same step wins: it was written after a restore.
                points.setdefault(name, {})[sft_step if name.startswith("sft/") else row["step"]] = value
    data.series = {name: Series(sorted(values), [values[s] for s in sorted(values)]) for name, values in points.items()}


def dumps(folder: Path) -> dict[int, Path]:
    """A folder's dumps by step, in their order."""
    if not folder.is_dir():
        return {}
    matches = ((_DUMP.fullmatch(path.name), path) for path in folder.iterdir() if path.is_file())
    return dict(sorted((int(match[1]), path) for match, path in matches if match))
