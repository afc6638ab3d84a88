"""A run as one Slurm job: it completes, and goes on from its newest checkpoint whatever is killed or signalled.

The real script, the real trainer, controller and engine, a real Slurm with emulated nodes. Starting all of it takes
most of the time, so that one job carries several faults.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from .jobs import submit
from .minislurm import MiniSlurm
from .train_jobs import PATIENCE_S, ROOT, TINY, assert_books_whole, submit_run

pytestmark = pytest.mark.timeout(1500)


def test_a_killed_rank_is_restarted_in_the_job_and_term_saves_requeues_and_resumes(
    slurm: MiniSlurm, inputs: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "a run"
    run = submit_run(slurm, folder, inputs, *TINY, "steps=6")
    run.wait_for_checkpoint(1)
    run.send(signal.SIGKILL, "trainer", rank=1)
    run.wait_for_attempt(2)
    assert run.job.restarts == 0
    assert "trainer-node2-1 was ended by SIGKILL" in run.attempts[0]["reason"]
    assert (run.logs / "attempt-2" / "trainer-node1-0.log").exists()

    run.job.signal("TERM")
    run.job.wait_for_restart(timeout_s=PATIENCE_S)
    assert run.job.wait_for_end(timeout_s=PATIENCE_S) == "COMPLETED"
    first, second, third = run.attempts
    assert (first["verdict"], second["verdict"], third["verdict"]) == ("failed", "stopped by a signal", "complete")
    assert third["from"] is not None
    assert third["from"] >= second["from"] >= "step-000001" > str(first["from"] or "")
    assert run.steps == [1, 2, 3, 4, 5, 6]
    assert_books_whole(run)
    assert json.loads((folder / "result.json").read_text())["steps"] == 6


def test_an_allocation_that_does_not_fit_is_refused_in_one_message(
    slurm: MiniSlurm, inputs: Path, tmp_path: Path
) -> None:
    run = submit_run(slurm, tmp_path / "run", inputs, *TINY, "cluster.spare_nodes=1")
    assert run.job.wait_for_end(timeout_s=PATIENCE_S) == "FAILED"
    assert run.job.fields()["ExitCode"] == "2:0"
    (line,) = [line for line in run.job.output().splitlines() if "error" in line]
    assert "the allocation has 3 nodes (node1,node2,node3)" in line
    assert "needs 4 nodes (= 2 trainer, 1 engines + 1 spare)" in line
    assert "--nodes=4" in line
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("place", ["MEGATRON_RL_ENV", "PATH", ".venv of the checkout"])
def test_the_script_finds_the_environment_wherever_it_lies_and_passes_words_on_whole(
    slurm: MiniSlurm, tmp_path: Path, place: str
) -> None:
    checkout = tmp_path / "a check out"
    prefix = checkout / ".venv" if place.startswith(".venv") else tmp_path / "an environment"
    command = prefix / "bin" / "megatron-rl"
    for folder in (checkout / "launch", command.parent):
        folder.mkdir(parents=True)
    command.write_text('#!/bin/bash\nprintf "<%s>" "$0" "$@"\n')
    command.chmod(0o755)
    script = shutil.copy(ROOT / "launch" / "train.sbatch", checkout / "launch")
    path = os.environ["PATH"].replace(f"{sys.prefix}/bin", "")
    env = {"PATH": f"{command.parent}:{path}" if place == "PATH" else path}
    env |= {"MEGATRON_RL_ENV": str(prefix)} if place == "MEGATRON_RL_ENV" else {}
    job = submit(slurm, Path(script), "my run.yaml", "name=a b", env=env, directory=tmp_path)
    assert job.wait_for_end(timeout_s=PATIENCE_S) == "COMPLETED", job.describe()
    assert job.output() == f"<{command}><slurm><my run.yaml><name=a b>"
