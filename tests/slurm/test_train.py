"""A run as one Slurm job: it completes, and goes on from its newest checkpoint whatever is killed or signalled.

The real script, the real trainer, controller and engine, a real Slurm with emulated nodes. Starting all of it takes
most of the time, so that one job carries several faults.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from megatron_rl.audit import audit_run
from tests.e2e.live import rows
from tests.e2e.runs import make_inputs

from .minislurm import MiniSlurm
from .train_jobs import PATIENCE_S, TINY, submit_run

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"), prompts=16, eval_prompts=8, sft_prompts=64)


def assert_whole(folder: Path, steps: int) -> None:
    """Every step stands once in the metrics, and no prompt is lost or doubled."""
    assert [row["step"] for row in rows(folder) if "policy/loss" in row] == list(range(1, steps + 1))
    assert audit_run(folder).problems == []


def test_a_killed_rank_is_restarted_in_the_job_and_term_saves_requeues_and_resumes(
    slurm: MiniSlurm, inputs: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "a run"
    run = submit_run(slurm, folder, inputs, *TINY, "steps=4")
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
    assert_whole(folder, 4)
    assert json.loads((folder / "result.json").read_text())["steps"] == 4


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
