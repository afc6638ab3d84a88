"""Rank 0's view of a run: writers, display and health rules behind one object. Computes no metric."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .health import HealthMonitor
from .metrics import MetricValue
from .progress import Mode, Progress
from .report import build_report
from .result import RunResult
from .writers import Writers


class Recorder:
    """Writes, shows and judges the metrics of one run.

    Args:
        run_dir: the run's directory.
        name: title of the display and of the run at Weights & Biases.
        console: how progress is shown, as in `logging.console`.
        updates_per_batch: tells the health rules whether clipping is to be expected.
        loss: `algorithm.loss`, tells them how much of it.
        resume_step: rows beyond it are dropped first; None for a new run.
        writers: further arguments of `Writers.open`.
    """

    def __init__(
        self,
        run_dir: Path,
        name: str,
        *,
        console: Mode,
        updates_per_batch: int,
        loss: str,
        resume_step: int | None,
        **writers: Any,
    ) -> None:
        self._run_dir = run_dir
        self._writers = Writers.open(run_dir, name=name, resume_step=resume_step, **writers)
        self._health = HealthMonitor(updates_per_batch=updates_per_batch, loss=loss)
        self.progress = Progress(name, mode=console)

    def step(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """A step is complete."""
        self._writers.write(step, metrics)
        self.progress.step(step, metrics)
        for line in self._health.observe(step, metrics):
            self.progress.note(line)

    def sft_step(self, number: int, metrics: Mapping[str, MetricValue]) -> None:
        """A step of the supervised warm-up, all of which lies before RL step 1."""
        self._writers.write(0, metrics)
        self.progress.step(number, metrics)

    def values(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Numbers that belong to no finished step, such as the evaluation before the first one."""
        self._writers.write(step, metrics)
        self.progress.values(step, metrics)

    def finish(self, result: RunResult) -> None:
        """Write the result and the report, and show both."""
        result.write()
        self._writers.close()
        page = build_report(self._run_dir)
        self.progress.summary(result)
        self.progress.note(f"report: {page}")
        print(result.line(), flush=True)

    def close(self) -> None:
        """Take the display away; what was written stays."""
        self.progress.close()
        self._writers.close()
