"""The emulated cluster itself: what tests of the scripts rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .jobs import submit
from .minislurm import MARK, MiniSlurm, marked, wait_until

ROOT = Path(__file__).parents[2]


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/bash\n{text}")
    return path


def test_nodes_have_names_gpus_and_a_tmp_of_their_own(slurm: MiniSlurm) -> None:
    show = "touch /tmp/of-$SLURMD_NODENAME; echo $(hostname) $CUDA_VISIBLE_DEVICES $(cd /tmp && ls -d of-*)"
    lines = slurm.run("srun", "-N4", "--gpus-per-node=2", "bash", "-c", show).splitlines()
    assert sorted(lines) == [f"node{i} 0,1 of-node{i}" for i in range(1, 5)]


def test_a_job_reports_its_output_and_its_exit_code(slurm: MiniSlurm, tmp_path: Path) -> None:
    job = submit(
        slurm, script(tmp_path / "a.sh", 'echo "$1 $WORD"\nexit 7\n'), "one", env={"WORD": "two"}, directory=tmp_path
    )
    assert job.wait_for_end(timeout_s=30) == "FAILED"
    assert job.output() == "one two\n"
    assert job.fields()["ExitCode"] == "7:0"


def test_a_requeued_job_runs_again_under_its_id(slurm: MiniSlurm, tmp_path: Path) -> None:
    text = 'echo start $SLURM_RESTART_COUNT\n[ -n "$SLURM_RESTART_COUNT" ] || sleep 600\n'
    job = submit(
        slurm, script(tmp_path / "a.sh", text), options=["--requeue", "--open-mode=append"], directory=tmp_path
    )
    job.wait_for(lambda: "start" in job.output(), 30, "the first start")
    job.requeue()
    job.wait_for_restart(timeout_s=60)
    assert job.wait_for_end(timeout_s=30) == "COMPLETED", job.describe()
    assert job.output().split("\n")[-2] == "start 1"


def test_a_child_that_left_the_job_is_found(slurm: MiniSlurm, tmp_path: Path) -> None:
    job = submit(slurm, script(tmp_path / "a.sh", "setsid sleep 321 &\n"), directory=tmp_path)
    job.wait_for_end(timeout_s=30)
    (left,) = job.processes("sleep 321")
    os.kill(left, signal.SIGKILL)


@pytest.mark.slow
def test_a_silent_node_goes_down_and_comes_back(slurm: MiniSlurm) -> None:
    slurm.kill_slurmd("node4")
    slurm.wait_for_node("node4", "DOWN")
    slurm.start_node("node4")
    slurm.wait_for_node("node4", "IDLE")


def test_a_cluster_whose_owner_is_killed_takes_everything_along(slurm: MiniSlurm) -> None:
    # Without the mark of our own cluster, whose end would else be its janitor's end too.
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.slurm.minislurm"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        words = dict(word.split("=") for word in owner.stdout.readline().split()[1:])
        mark = f"{MARK}={words[MARK]}"
        slurm.run("sbatch", f"--chdir={words[MARK]}", "--wrap=setsid sleep 600 & sleep 600", env=words)
        daemons = 6
        wait_until(lambda: len(marked(mark)) >= daemons + 3, 30, "the job to run")
    finally:
        owner.kill()
        owner.wait()
    wait_until(lambda: not marked(mark) and not Path(words[MARK]).exists(), 30, "the end of the other cluster")
    assert slurm.node_state("node1") == "IDLE"


def test_a_word_that_asks_for_help_starts_no_cluster() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "tests.slurm.minislurm", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert said.returncode == 0, said.stderr
    assert "SLURM_CONF" in said.stdout
    assert "nodes are up" not in said.stdout


@pytest.mark.parametrize("command", [["srun", "false"], ["scontrol", "show", "job", "999999"]])
def test_a_failing_command_says_what_it_said(slurm: MiniSlurm, command: list[str]) -> None:
    with pytest.raises(RuntimeError, match="exit 1"):
        slurm.run(*command)
