"""A run on Slurm that is put back into the queue, and the quickstart from beginning to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.live import rows
from tests.e2e.runs import make_inputs

from .jobs import submit
from .minislurm import MiniSlurm, wait_until
from .train_jobs import PATIENCE_S, TINY, TrainJob, assert_books_whole, submit_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def newest(run: TrainJob) -> str:
    return max(path.name for path in (run.folder / "checkpoints").glob("step-*"))


def test_the_quickstart_completes_on_three_nodes_and_the_reward_rises(
    slurm: MiniSlurm, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = make_inputs(tmp_path_factory.mktemp("quickstart"))
    run = submit_run(slurm, tmp_path / "run", made, "cluster.trainer_nodes=2", "logging.console=plain")
    assert run.job.wait_for_end(timeout_s=1500) == "COMPLETED"
    rewards = [row["reward/mean"] for row in rows(run.folder) if "policy/loss" in row]
    assert len(rewards) == 60
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 1.0
    assert len(run.attempts) == 1
    assert_books_whole(run)


def test_preemption_a_signal_to_the_script_and_a_requeue_in_mid_save_lose_nothing(
    slurm: MiniSlurm, inputs: Path, tmp_path: Path
) -> None:
    run = submit_run(slurm, tmp_path / "run", inputs, *TINY, "steps=100000", options=["--partition=low"])
    run.wait_for_checkpoint(2)

    nap = tmp_path / "important.sh"
    nap.write_text("#!/bin/bash\nsleep 1\n")
    submit(slurm, nap, options=["--nodes=4", "--exclusive"], directory=tmp_path)
    wait_until(lambda: run.job.restarts == 1, PATIENCE_S, "the preemption", run.job.describe)
    assert run.attempts[0]["verdict"] == "stopped by a signal"
    assert "back into the queue (number 1)" in run.job.output()
    saved = newest(run)
    run.job.wait_for_restart(1, timeout_s=PATIENCE_S)
    run.wait_for_attempt(2)
    assert run.attempts[-1]["from"] == saved

    # As Slurm sends it when --signal=B:USR2@N is due: to the batch script alone.
    run.job.signal("USR2", batch=True)
    wait_until(lambda: run.job.restarts == 2, PATIENCE_S, "the requeue", run.job.describe)
    assert "got SIGUSR2" in run.job.output()
    saved = newest(run)
    run.job.wait_for_restart(2, timeout_s=PATIENCE_S)
    run.wait_for_attempt(3)
    assert run.attempts[-1]["from"] == saved

    run.job.wait_for(lambda: any((run.folder / "checkpoints").glob(".tmp-step-*/policy/*")), PATIENCE_S, "a save")
    run.job.requeue()
    wait_until(lambda: run.job.restarts == 3, PATIENCE_S, "the requeue", run.job.describe)
    run.job.wait_for_restart(3, timeout_s=PATIENCE_S)
    run.wait_for_attempt(4)
    assert run.attempts[-1]["from"] >= saved

    run.job.cancel()
    assert run.job.wait_for_end(timeout_s=PATIENCE_S) == "CANCELLED"
    assert run.job.restarts == 3


def test_near_its_time_limit_a_run_on_shared_nodes_saves_itself_and_queues_again(
    slurm: MiniSlurm, inputs: Path, tmp_path: Path
) -> None:
    options = ["--time=4", "--signal=B:USR2@100"]
    words = (*TINY, "steps=100000", "cluster.placement=colocated")
    run = submit_run(slurm, tmp_path / "run", inputs, *words, nodes=2, options=options)
    wait_until(lambda: run.job.restarts == 1, PATIENCE_S, "the requeue", run.job.describe)
    assert "got SIGUSR2" in run.job.output()
    assert run.attempts[0]["nodes"] == {"trainer": ["node1", "node2"], "engines": ["node1"], "spare": []}
    assert newest(run) > "step-000000"
    assert_books_whole(run)
