"""What srun and Slurm say, and what is made of it: ends of tasks, sizes of nodes, the record, leaving the job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.cluster.slurm.allocation import Allocation, least
from megatron_rl.cluster.slurm.attempt import Progress
from megatron_rl.cluster.slurm.placement import NodeShape
from megatron_rl.cluster.slurm.record import JobRecord
from megatron_rl.cluster.slurm.steps import Ended, Step, parse
from megatron_rl.config import ConfigError


@pytest.mark.parametrize(
    ("line", "node", "task", "code", "words"),
    [
        ("srun: error: node1: task 0: Exited with exit code 75", "node1", "0", 75, "can be resumed"),
        ("srun: error: node2: tasks 8-11,14: Killed", "node2", "8-11,14", 137, "SIGKILL"),
        ("srun: error: node2: task 3: Exited with exit code 137", "node2", "3", 137, "out of memory?"),
        ("srun: error: node2: task 3: Out Of Memory", "node2", "3", 137, "out of memory"),
        ("srun: error: node2: task 3: Terminated", "node2", "3", 143, "SIGTERM"),
        ("srun: error: node2: task 3: Segmentation fault (core dumped)", "node2", "3", 139, "SIGSEGV"),
        ("srun: error: Node failure on node3", "node3", "", None, "was lost"),
        (
            "srun: error: Task launch for StepId=7.2 failed on node node3: Communication connection failure",
            "node3",
            "",
            None,
            "was lost",
        ),
    ],
)
def test_what_srun_says_of_a_task_is_understood(line: str, node: str, task: str, code: int | None, words: str) -> None:
    found = parse(line + "\n")
    assert found is not None
    assert (found.node, found.task, found.code) == (node, task, code)
    assert words in found.words


@pytest.mark.parametrize("line", ["srun: forcing job termination", "a line of somebody else: task 1: Killed", ""])
def test_other_lines_say_nothing(line: str) -> None:
    assert parse(line) is None


@pytest.mark.parametrize(("code", "resumable"), [(75, True), (143, True), (140, True), (137, False), (1, False)])
def test_an_obeyed_signal_is_told_from_a_failure(code: int, resumable: bool) -> None:
    found = parse(f"srun: error: node1: task 0: Exited with exit code {code}")
    assert found is not None
    assert found.may_be_resumed is resumable


def test_a_step_tells_its_first_bad_end_with_the_log_of_that_task(tmp_path: Path) -> None:
    (tmp_path / "trainer-node2-4.log").write_text("the reason\n")
    said = "srun: error: node2: tasks 4-7: Exited with exit code 1\nsrun: error: node1: task 0: Killed\n"
    argv = [sys.executable, "-c", f"import sys; sys.stderr.write({said!r}); sys.exit(137)"]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    step = Step("trainer", process, tmp_path)
    step.read(tmp_path / "trainer.srun.log")
    process.wait(60)
    assert step.code == 137
    assert [ended.node for ended in step.ended] == ["node2", "node1"]
    assert step.bad_nodes == ("node2",)
    assert step.describe_end().startswith("trainer-node2-4-7 failed with exit code 1; log ")
    assert "the reason" in step.describe_end()
    assert (tmp_path / "trainer.srun.log").read_text() == said


def test_a_lost_node_is_what_counts_although_the_step_ends_with_0(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], stderr=subprocess.PIPE, text=True)
    ended = [Ended("node1", "0", 137, "was killed"), Ended("node3", "", None, "was lost")]
    step = Step("engines", process, tmp_path, ended)
    process.communicate()
    assert step.code == 0
    assert step.bad_nodes == ("node3",)
    assert step.describe_end() == "engines: node node3 was lost"


def test_sizes_of_nodes_come_from_the_job_and_the_smallest_counts() -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": "96(x3),64", "SLURM_GPUS_ON_NODE": "8"}
    assert Allocation.of(env) == Allocation("7", NodeShape(64, 8))
    assert least("16") == 16


def test_outside_a_job_the_way_to_submit_one_is_told() -> None:
    with pytest.raises(ConfigError, match=r"sbatch --nodes=N launch/train\.sbatch"):
        Allocation.of({})


def test_the_record_outlives_its_process(tmp_path: Path) -> None:
    record = JobRecord.load(tmp_path / "job.json")
    assert record.begin({"trainer": ["a", "b"]}, None) == 1
    record.finish("failed", "node b\nwith details", ("b",), 3.0)
    again = JobRecord.load(tmp_path / "job.json")
    assert again.begin({"trainer": ["a", "c"]}, "step-000002") == 2
    assert again.attempts[0]["reason"] == "node b"
    assert again.strikes == {"b": 1}


def test_progress_is_a_new_row_and_not_the_cut_of_a_restart(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("1\n2\n3\n")
    progress = Progress(metrics)
    progress.idle_s()
    metrics.write_text("1\n")
    progress.idle_s()
    assert progress.first_s is None
    metrics.write_text("1\n2\n")
    progress.idle_s()
    assert progress.first_s is not None
