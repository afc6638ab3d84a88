"""Two runs of one user on the same nodes at the same time: ports, /tmp and locks are each run's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.audit import audit_run

from .minislurm import MiniSlurm
from .train_jobs import PATIENCE_S, TINY, TrainJob, submit_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
HALF_A_NODE = ["--exclusive=user", "--ntasks-per-node=1", "--cpus-per-task=8", "--mem=8000", "--nodelist=node[1-3]"]


def test_two_jobs_on_the_same_nodes_do_not_disturb_each_other(slurm: MiniSlurm, inputs: Path, tmp_path: Path) -> None:
    runs = [
        submit_run(slurm, tmp_path / name, inputs, *TINY, "steps=2", options=HALF_A_NODE) for name in ("one", "two")
    ]
    for run in runs:
        assert run.job.wait_for_state("RUNNING", timeout_s=60) == "RUNNING"
    nodes = {run.job.fields()["NodeList"] for run in runs}
    assert nodes == {"node[1-3]"}
    for run in runs:
        assert run.job.wait_for_end(timeout_s=2 * PATIENCE_S) == "COMPLETED", run.job.describe()
        assert run.steps == [1, 2]
        assert len(run.attempts) == 1
        assert audit_run(run.folder).problems == []
    assert began(runs[1]) < ended(runs[0])


def began(run: TrainJob) -> str:
    """Start of the job, in Slurm's words, which sort like time."""
    return run.job.fields()["StartTime"]


def ended(run: TrainJob) -> str:
    """End of the job."""
    return run.job.fields()["EndTime"]
