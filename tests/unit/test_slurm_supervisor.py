"""What follows from the end of an attempt on Slurm. Attempts and answers are scripted; tests/slurm has real ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cluster.processes import Signalled
from megatron_rl.cluster.run_dir import RunDir, RunDirError
from megatron_rl.cluster.slurm import supervisor as module
from megatron_rl.cluster.slurm.allocation import SlurmError
from megatron_rl.cluster.slurm.attempt import Outcome, Verdict
from megatron_rl.cluster.slurm.placement import NodeShape, Placement
from megatron_rl.cluster.slurm.supervisor import Start, Supervisor
from megatron_rl.config import Config, load_config
from tests.least import least


@dataclass
class ScriptedSlurm:
    """An allocation of four nodes; `left` are those that are usable, attempt by attempt."""

    job: str = "7"
    shape: NodeShape = field(default_factory=lambda: NodeShape(16))
    left: list[list[str]] = field(default_factory=list)
    running: bool = True
    requeueable: bool = True
    requeued: int = 0

    def nodes(self) -> list[str]:
        return ["node1", "node2", "node3", "node4"]

    def usable(self, nodes: Sequence[str]) -> list[str]:
        return self.left.pop(0) if self.left else list(nodes)

    def is_running(self) -> bool:
        return self.running

    def requeue(self) -> None:
        if not self.requeueable:
            raise SlurmError("scontrol requeue 7: exit 1: Requested operation is presently disabled")
        self.requeued += 1


class Rig:
    """A supervisor whose attempts end as told: (verdict, step of the checkpoint that the attempt saved, if any)."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slurm, self.folder = ScriptedSlurm(), folder
        self.seen: list[tuple[Placement, str | None]] = []
        self.script: Iterator[tuple[Verdict, int | None]] = iter(())
        rig = self

        class ScriptedAttempt:
            def __init__(self, cfg: Config, placement: Placement, *_: object) -> None:
                self.placement = placement

            def run(self, checkpoint: Path | None) -> Outcome:
                rig.seen.append((self.placement, checkpoint.name if checkpoint else None))
                verdict, step = next(rig.script)
                if step is not None:
                    (folder / "checkpoints" / f"step-{step:06d}").mkdir()
                return Outcome(verdict, "as told", ("node1",) if verdict is Verdict.FAILED else ())

        monkeypatch.setattr(module, "Attempt", ScriptedAttempt)
        monkeypatch.setattr(module, "REQUEUE_PATIENCE_S", 0.0)

    def newest(self) -> Path | None:
        return max((self.folder / "checkpoints").glob("step-*"), default=None)

    def run(self, *script: tuple[Verdict, int | None], **cluster: Any) -> int:
        """The exit code of one start of the batch script; it was given --resume if a checkpoint is there."""
        cluster = {"ranks_per_node": 1, "spare_nodes": 1, "restart_pause_s": 0.001, **cluster}
        cfg = least(run_dir=str(self.folder), parallel={"data_parallel_size": 2}, cluster=cluster)
        self.script = iter(script)
        start = Start(self.newest, self.newest if (self.folder / "checkpoints").exists() else None)
        return Supervisor(cfg, start, RunDir(self.folder), self.slurm, Signalled()).run()  # type: ignore[arg-type]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path / "run", monkeypatch)


COMPLETE, STOPPED, FAILED = Verdict.COMPLETE, Verdict.RESUMABLE, Verdict.FAILED


def test_a_failed_attempt_is_followed_by_one_from_the_newest_checkpoint_with_the_spare(rig: Rig) -> None:
    assert rig.run((FAILED, 4), (COMPLETE, 8)) == 0
    (first, begin), (second, again) = rig.seen
    assert (first.trainer, first.spares, begin) == (("node1", "node2"), ("node4",), None)
    assert (second.trainer, second.spares, again) == (("node2", "node3"), ("node1",), "step-000004")
    assert rig.slurm.requeued == 0


def test_attempts_that_save_nothing_are_bounded_and_one_that_saves_begins_the_count_anew(rig: Rig) -> None:
    failures = [(FAILED, None), (FAILED, None), (FAILED, 2), (FAILED, None), (FAILED, None), (FAILED, None)]
    assert rig.run(*failures, max_restarts=2) == 1
    assert len(rig.seen) == 6


def test_a_complete_run_that_is_resumed_has_no_attempt(rig: Rig) -> None:
    assert rig.run((COMPLETE, 200)) == 0
    for name in ("result.json", "report.html"):
        (rig.folder / name).write_text("{}")
    rig.slurm.job = "8"
    assert rig.run() == 0
    assert len(rig.seen) == 1


def test_a_run_whose_directory_was_moved_away_is_not_begun_anew_at_its_old_path(rig: Rig) -> None:
    rig.folder.mkdir()
    (rig.folder / ".lock").touch()

    def move_away() -> None:
        rig.folder.rename(rig.folder.with_name("elsewhere"))

    rig.newest = move_away  # type: ignore[method-assign]
    with pytest.raises(RunDirError, match="was moved, renamed or removed while the run went on"):
        rig.run((FAILED, None), (COMPLETE, 1))
    assert len(rig.seen) == 1
    assert not rig.folder.exists()


def test_a_smaller_run_is_what_the_processes_are_told(rig: Rig) -> None:
    rig.slurm.left = [["node1", "node3"]]
    assert rig.run((COMPLETE, 1), min_dp=1) == 0
    written = load_config(rig.folder / "config.yaml")
    assert (written.parallel.data_parallel_size, written.parallel.world_size) == (1, 1)
    assert rig.seen[0][0].engines == ("node3",)


def test_a_stopped_job_goes_back_into_the_queue_and_on_from_its_checkpoint(rig: Rig) -> None:
    assert rig.run((STOPPED, 3)) == 75
    assert rig.slurm.requeued == 1
    assert rig.run((COMPLETE, 5)) == 0
    assert rig.seen[1][1] == "step-000003"


def test_a_second_requeue_needs_a_newer_checkpoint(rig: Rig) -> None:
    assert [rig.run((STOPPED, None)) for _ in range(2)] == [75, 75]
    assert rig.slurm.requeued == 1
    assert rig.run((STOPPED, 1)) == 75
    assert rig.slurm.requeued == 2


def test_requeues_are_bounded(rig: Rig) -> None:
    for step in range(1, 5):
        assert rig.run((STOPPED, step), max_requeues=2) == 75
    assert rig.slurm.requeued == 2


def test_a_cancelled_job_does_not_come_back(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    rig.slurm.running = False
    assert rig.run((STOPPED, 1)) == 75
    assert f"submit it again with --resume to go on with {rig.folder}" in caplog.messages[-1]
    assert rig.slurm.requeued == 0


def test_a_job_that_slurm_does_not_requeue_ends_resumable(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.slurm.requeueable = False
    assert rig.run((STOPPED, 1)) == 75
    assert "presently disabled; submit it again with --resume" in caplog.text
