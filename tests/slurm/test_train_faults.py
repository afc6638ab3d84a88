"""More faults of a run on Slurm, several in each job: dead engines, hangs, cancelling, lost nodes."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from pathlib import Path

import psutil
import pytest

from .minislurm import MiniSlurm, wait_until
from .train_jobs import PATIENCE_S, TINY, assert_books_whole, submit_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def test_a_dead_engine_is_replaced_a_dead_controller_or_hung_rank_restarts_and_cancelling_leaves_nothing(
    slurm: MiniSlurm, inputs: Path, tmp_path: Path
) -> None:
    words = ("steps=100000", "cluster.progress_timeout_s=90", "reward.workers=1")
    seconds = secrets.randbelow(10**6) + 10**6  # by which its processes are told from those of others
    hook = f'{{name: "tests.slurm.hooks:leaves_a_child", args: {{seconds: {seconds}}}, correctness: true}}'
    words += (f"reward.components=[{hook}, {{name: sorting_format}}]",)
    run = submit_run(slurm, tmp_path / "run", inputs, *TINY, *words)
    run.wait_for_checkpoint(1)
    run.send(signal.SIGKILL, "engines")
    log = run.logs / "attempt-1" / "engines-node3-0.log"
    run.job.wait_for(lambda: "starting it again" in log.read_text(), PATIENCE_S, "the engine's restart")
    run.wait_for_step(max(run.steps) + 2)
    assert len(run.attempts) == 1

    run.send(signal.SIGKILL, "controller")
    run.wait_for_attempt(2)
    assert "controller-node1-0 was ended by SIGKILL" in run.attempts[0]["reason"]

    run.send(signal.SIGSTOP, "trainer", rank=1)
    run.wait_for_attempt(3)
    assert "no progress for 90 s (cluster.progress_timeout_s)" in run.attempts[1]["reason"]
    for rank, node in enumerate(("node1", "node2")):
        (dump,) = (run.logs / "attempt-2").glob(f"stacks-trainer-{node}-{rank}-*.txt")
        assert "megatron_rl/train.py" in dump.read_text()
    (stopped,) = (run.logs / "attempt-2").glob("stacks-trainer-node2-1-*.txt")
    assert stopped.read_text().startswith("State:\tT")

    run.job.wait_for(lambda: sleepers(seconds), PATIENCE_S, "a child that has left its session")
    run.job.cancel()
    assert run.job.wait_for_end(timeout_s=PATIENCE_S) == "CANCELLED"
    wait_until(lambda: not run.job.processes() and not sleepers(seconds), PATIENCE_S, "the end of all processes")
    assert run.job.restarts == 0


def test_lost_nodes_are_replaced_by_a_spare_and_then_done_without(
    slurm: MiniSlurm, inputs: Path, tmp_path: Path
) -> None:
    layout = ("parallel.tensor_model_parallel_size=1", "parallel.data_parallel_size=2", "cluster.ranks_per_node=1")
    words = ("steps=100000", "cluster.spare_nodes=1", "cluster.min_dp=1", *layout)
    run = submit_run(slurm, tmp_path / "run", inputs, *TINY, *words, nodes=4)
    run.wait_for_checkpoint(1)
    assert run.attempts[0]["nodes"] == {"trainer": ["node1", "node2"], "engines": ["node3"], "spare": ["node4"]}
    try:
        lose(slurm, "node3")
        run.wait_for_attempt(2)
        assert run.attempts[1]["nodes"] == {"trainer": ["node1", "node2"], "engines": ["node4"], "spare": []}

        slurm.drain("node2")
        run.send(signal.SIGKILL, "trainer", rank=1)
        run.wait_for_attempt(3)
        assert run.attempts[2]["nodes"] == {"trainer": ["node1"], "engines": ["node4"], "spare": []}
        assert "at a smaller size: parallel.data_parallel_size=1" in run.job.output()
        assert run.job.restarts == 0
        assert_books_whole(run)
    finally:
        run.job.cancel()
        slurm.resume("node2")
        slurm.start_node("node3")
        slurm.wait_for_node("node3", "IDLE")


def sleepers(seconds: int) -> list[psutil.Process]:
    """Processes on this machine that sleep for so long."""
    return [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", str(seconds)]]


def lose(slurm: MiniSlurm, node: str) -> None:
    """As when the power fails: everything ends that runs on the node, which is all that has its host name."""
    machine = namespace(slurm.daemons[f"slurmd-{node}"].pid)
    slurm.kill_slurmd(node)
    while pids := [int(e.name) for e in Path("/proc").iterdir() if e.name.isdigit() and namespace(e.name) == machine]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def namespace(pid: int | str) -> str | None:
    """Of the host name, or None for a process that has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/uts")
    except OSError:
        return None
