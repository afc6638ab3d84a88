"""`launch/train.sbatch` on the emulated cluster with the real trainer: submit, look at it, hit it. No tests here."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.audit import audit_run
from megatron_rl.tags import tag_of
from tests.e2e.live import rows

from .jobs import Job, submit
from .minislurm import MiniSlurm

ROOT = Path(__file__).parents[2]
PATIENCE_S = 400.0
"""For anything that needs all processes to start: each imports torch, on the cores that all nodes share."""
TINY = (
    "cluster.trainer_nodes=2",
    "cluster.stop_timeout_s=10",
    "cluster.restart_pause_s=1",
    "logging.console=plain",
    "logging.tensorboard=false",
    "sft.data=null",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.dynamic_sampling=off",
    "rollout.request_timeout_s=300",  # an engine that restarts imports torch in the meantime
    "rollout.step_timeout_s=600",
    "engine.max_running_requests=16",
    "eval.prompts=8",
    "eval.every=0",
    "checkpoint.every=1",
    "algorithm.preset=grpo",
)
"""The real stack at a size that leaves little to do but to start."""


@dataclass(frozen=True)
class TrainJob:
    """One submitted run."""

    job: Job
    folder: Path

    @property
    def steps(self) -> list[int]:
        """Numbers of the RL steps whose row is written."""
        return [row["step"] for row in rows(self.folder) if "policy/loss" in row]

    @property
    def logs(self) -> Path:
        """Where the attempts' logs lie."""
        return self.folder / "logs" / f"quickstart-{self.job.id}"

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """What the job remembers of its attempts."""
        path = self.logs / "job.json"
        return json.loads(path.read_text())["attempts"] if path.exists() else []

    def wait_for_step(self, step: int) -> None:
        """Until the row of RL step `step` is written."""
        self.job.wait_for(lambda: max(self.steps, default=0) >= step, PATIENCE_S, f"step {step}")

    def wait_for_checkpoint(self, step: int) -> None:
        """Until the run has saved itself after step `step`."""
        path = self.folder / "checkpoints" / f"step-{step:06d}"
        self.job.wait_for(path.exists, PATIENCE_S, f"the checkpoint of step {step}")

    def wait_for_attempt(self, number: int) -> None:
        """Until attempt `number` has written its first row: whatever happened before, the run goes on."""
        self.job.wait_for(
            lambda: self.job.output().count("first progress of this attempt") >= number, PATIENCE_S, f"attempt {number}"
        )

    def wait_for_output(self, text: str) -> None:
        """Until the batch script has said so."""
        self.job.wait_for(lambda: text in self.job.output(), PATIENCE_S, repr(text))

    def pids(self, role: str, command: str) -> dict[int, int]:
        """Rank (of a task) -> process id, of the living processes of a role whose command line holds `command`."""
        found = {}
        for pid in self.job.processes(command):
            tag = (tag_of(pid) or "").split("/")
            if tag[-3:-2] == [role]:
                found[int(tag[-1])] = pid
        return found

    def send(self, number: signal.Signals, role: str, rank: int = 0) -> None:
        """A signal to a trainer rank, an engine or the controller itself, not to what watches over it."""
        command = {"trainer": "megatron_rl.train", "engines": "--unsupervised", "controller": "rollout"}[role]
        os.kill(self.pids(role, command)[rank], number)


def assert_books_whole(run: TrainJob) -> None:
    """Steps follow each other without a gap or a double, and so do the prompts."""
    assert run.steps == list(range(1, len(run.steps) + 1))
    assert audit_run(run.folder).problems == []


def submit_run(
    slurm: MiniSlurm, folder: Path, inputs: Path, *words: str, nodes: int = 3, options: Sequence[str] = ()
) -> TrainJob:
    """`sbatch launch/train.sbatch configs/quickstart.yaml` with this Python's environment; `folder` holds spaces."""
    script, config = ROOT / "launch" / "train.sbatch", ROOT / "configs" / "quickstart.yaml"
    job = submit(
        slurm,
        script,
        str(config),
        f"run_dir={folder}",
        f"vars.inputs={inputs}",
        *words,
        options=[f"--nodes={nodes}", "--time=60", *options],
        env={"MEGATRON_RL_ENV": sys.prefix, "PYTHONPATH": str(ROOT)},
        directory=folder.parent,
    )
    return TrainJob(job, folder)
