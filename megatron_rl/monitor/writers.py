"""Where the metrics of a step are written: metrics.jsonl, TensorBoard, Weights & Biases, or all of them at once.

Collecting the numbers is in `metrics`, the JSONL record in `metrics_log`, showing them in `progress` and `report`. A
record that cannot be written stops the run; the others are views: one that fails is reported once and left out.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from megatron_rl.files import write_atomic

from .metrics import MetricValue
from .metrics_log import METRICS_FILE, SFT_STEP, MetricsLog

_log = logging.getLogger(__name__)


class Writer(Protocol):
    """What every writer can do. Steps count optimizer batches; step 0 is before the first."""

    def write(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Add one row."""

    def truncate_after(self, step: int) -> None:
        """Forget rows beyond `step`, to which the run was restored."""

    def close(self) -> None:
        """Make everything written durable. Closing twice is allowed."""


class TensorBoardWriter:
    """RUN/tensorboard: every metric a scalar under its own name; `sft/...` over the warm-up's own steps in `warm-up`.

    A folder of its own, since TensorBoard hides by step whatever a restore undid: the warm-up must not go with it.
    """

    def __init__(self, directory: str | Path) -> None:
        """Open a new event file in `directory` (earlier ones stay). Raises OSError when it cannot be written."""
        # Imported here: half a second that only a run with TensorBoard should pay. Needs no torch, no TensorFlow.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._session = event_pb2.Event, summary_pb2.Summary, event_pb2.SessionLog
        self._open = EventFileWriter
        self._writer = EventFileWriter(str(directory))
        self._warm_up_directory = Path(directory) / "warm-up"
        self._warm_up: Any = None

    def write(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Add the values at `step` and flush them to the file."""
        self._add(self._writer, step, {name: value for name, value in metrics.items() if not _is_sft(name)})
        if sft := {name: value for name, value in metrics.items() if _is_sft(name)}:
            self._warm_up = self._warm_up or self._open(str(self._warm_up_directory))
            self._add(self._warm_up, int(metrics.get(SFT_STEP) or 0), sft)

    def _add(self, writer: Any, step: int, metrics: Mapping[str, MetricValue]) -> None:
        values = [self._summary.Value(tag=name, simple_value=v) for name, v in metrics.items() if v is not None]
        if values:
            writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        writer.flush()

    def truncate_after(self, step: int) -> None:
        """Tell TensorBoard that the run was restored to `step`: it hides whatever older files hold beyond it.

        A step below 0 is before the warm-up, which then begins again.
        """
        if step < 0:
            shutil.rmtree(self._warm_up_directory, ignore_errors=True)
        start = self._session(status=self._session.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=step + 1, session_log=start))
        self._writer.flush()

    def close(self) -> None:
        """Write what is queued and close the files."""
        self._writer.close()
        if self._warm_up is not None:
            self._warm_up.close()


def _is_sft(name: str) -> bool:
    return name.startswith("sft/")


class WandbWriter:
    """Weights & Biases, when the package is there. Its own settings decide the rest (`WANDB_MODE=offline` works).

    A resumed run goes on under the same id (RUN/wandb/run_id). Rows already sent cannot be taken back, so steps
    that are repeated after a restore appear twice there; charts over `step` show the later ones last.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        project: str,
        name: str,
        config: Mapping[str, Any],
    ) -> None:
        """Start or continue the run. Raises ModuleNotFoundError saying what to install when wandb is missing."""
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "logging.wandb=true needs the package wandb, which is not installed: run `pip install "
                "'megatron-rl[wandb]'`, or set logging.wandb=false"
            ) from error
        directory = Path(run_dir) / "wandb"
        directory.mkdir(parents=True, exist_ok=True)
        id_file = directory / "run_id"
        run_id = id_file.read_text("utf-8").strip() if id_file.exists() else secrets.token_hex(4)
        write_atomic(id_file, run_id.encode())
        self._run = wandb.init(
            project=project, name=name, config=dict(config), dir=str(run_dir), id=run_id, resume="allow"
        )
        self._run.define_metric("sft/*", step_metric=SFT_STEP)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Send one row, with the step as a column of its own (wandb's counter only ever grows)."""
        self._run.log({"step": step, **{name: value for name, value in metrics.items() if value is not None}})

    def truncate_after(self, step: int) -> None:
        """Nothing that was sent can be taken back; see the class."""

    def close(self) -> None:
        """Send what is left and end the run."""
        self._run.finish()


class Writers:
    """All writers of a run behind one. A failing `record` raises; a failing view is reported once and left out."""

    def __init__(self, record: Writer, views: Sequence[Writer] = ()) -> None:
        self._record = record
        self._views = list(views)

    @classmethod
    def open(
        cls,
        run_dir: str | Path,
        *,
        tensorboard: bool = True,
        wandb_project: str | None = None,
        name: str = "run",
        config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
    ) -> Self:
        """Open RUN's writers; with `resume_step` everything beyond that step is dropped first.

        Raises what the writers raise: a run that asks for a writer which cannot start should not begin.
        """
        run_dir = Path(run_dir)
        views: list[Writer] = []
        if tensorboard:
            views.append(TensorBoardWriter(run_dir / "tensorboard"))
        if wandb_project is not None:
            views.append(WandbWriter(run_dir, project=wandb_project, name=name, config=config or {}))
        writers = cls(MetricsLog(run_dir / METRICS_FILE), views)
        if resume_step is not None:
            writers.truncate_after(resume_step)
        return writers

    def write(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Write one row everywhere."""
        self._record.write(step, metrics)
        self._each_view("write", step, metrics)

    def truncate_after(self, step: int) -> None:
        """Forget rows beyond `step` everywhere."""
        self._record.truncate_after(step)
        self._each_view("truncate_after", step)

    def close(self) -> None:
        """Close all; the record first."""
        self._record.close()
        self._each_view("close")

    def _each_view(self, method: str, *args: Any) -> None:
        for view in list(self._views):
            try:
                getattr(view, method)(*args)
            except Exception:
                self._views.remove(view)
                _log.exception("%s failed and is left out from here on; metrics.jsonl goes on", type(view).__name__)
