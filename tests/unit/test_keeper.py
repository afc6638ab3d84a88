"""A task's keeper: signals, exit codes, and that nothing of the task stays behind, whatever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from megatron_rl.cluster.stacks import dump_stacks
from megatron_rl.tags import descendants, tagged
from tests.processes import wait_until

LEAVES = "import subprocess; subprocess.run('setsid sleep 600 & true', shell=True, start_new_session=True)\n"
LEAVES_UNNAMED = LEAVES.replace("setsid", "setsid env -i")
ON = "print('on', flush=True)\n"
WAITS = LEAVES + ON + "import time; time.sleep(600)"
SAVES = (
    "import signal, sys, time\n"
    "for number in (signal.SIGTERM, signal.SIGUSR2): signal.signal(number, lambda *_: sys.exit(75))\n" + WAITS
)
ENDS_ON_INT = "import signal, sys\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(3))\n" + WAITS


class Task:
    """A keeper with its role, as srun would start it; both have a name of their own."""

    def __init__(self, script: str, on_stop: str) -> None:
        self.run = uuid.uuid4().hex
        words = ["--run", self.run, "--role", "role", "--on-stop", on_stop, "--patience", "60", "--"]
        argv = [sys.executable, "-m", "megatron_rl.cluster.keeper", *words, sys.executable, "-c", script]
        env = {**os.environ, "SLURMD_NODENAME": "node7", "SLURM_PROCID": "3"}
        self.keeper = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env)

    def wait_until_on(self) -> None:
        """Until the role listens to signals."""
        assert self.keeper.stdout is not None
        assert self.keeper.stdout.readline() == "on\n"

    def role(self) -> int:
        """The role's process, once what it leaves behind is `sleep` and no longer a shell on its way there."""
        found: list[int] = []

        def settled() -> bool:
            sleeping = {pid: command(pid).startswith("sleep 600") for pid in descendants(self.keeper.pid)}
            found[:] = [pid for pid, sleeps in sleeping.items() if not sleeps]
            return sorted(sleeping.values()) == [False, True]

        wait_until(settled)
        return found[0]

    def end(self) -> int:
        """The keeper's exit code, when nothing of the task is left."""
        code = self.keeper.wait(60)
        wait_until(lambda: not tagged(self.run))
        return code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_rank_gets_the_signal_and_its_exit_code_is_the_task_s(number: signal.Signals) -> None:
    task = Task(SAVES, "pass")
    task.wait_until_on()
    task.role()
    assert len(tagged(f"{task.run}/role/node7/3")) == 2  # the role, and what it left in another session
    task.keeper.send_signal(number)
    assert task.end() == 75


def test_what_serves_the_trainer_outlives_a_stop_and_ends_when_told() -> None:
    task = Task(ENDS_ON_INT, "end")
    task.wait_until_on()
    role = task.role()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        task.keeper.send_signal(number)
    for number in (signal.SIGUSR2, signal.SIGUSR1):  # which reach every process of the step
        os.kill(role, number)
    task.keeper.send_signal(signal.SIGUSR1)
    assert task.end() == 3


def test_a_killed_role_is_told_as_a_shell_would_and_its_children_end() -> None:
    task = Task(WAITS, "pass")
    task.wait_until_on()
    role = task.role()
    os.kill(role, signal.SIGKILL)
    assert task.end() == 128 + signal.SIGKILL


def test_a_child_without_parent_session_and_name_ends_too() -> None:
    task = Task("import time\n" + LEAVES_UNNAMED + "print('on', flush=True); time.sleep(600)", "pass")
    task.wait_until_on()
    role = task.role()
    (left,) = set(descendants(task.keeper.pid)) - {role}
    os.kill(role, signal.SIGKILL)
    assert task.end() == 128 + signal.SIGKILL
    wait_until(lambda: not Path(f"/proc/{left}").exists())


def test_nothing_survives_the_kill_of_the_keeper() -> None:
    task = Task(WAITS, "pass")
    task.wait_until_on()
    task.keeper.kill()
    assert task.end() == -signal.SIGKILL


def test_stacks_of_a_task_are_dumped_even_when_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task("def here():\n    import time; print('on', flush=True); time.sleep(600)\nhere()", "pass")
    task.wait_until_on()
    (role,) = tagged(task.run)
    os.kill(role, signal.SIGSTOP)
    monkeypatch.setenv("SLURMD_NODENAME", "node8")
    assert dump_stacks(task.run, tmp_path) == []
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    (dump,) = dump_stacks(task.run, tmp_path)
    assert dump.name == f"stacks-role-node7-3-{role}.txt"
    assert dump.read_text().startswith("State:\tT")
    assert "here (<string>:2)" in dump.read_text()
    task.keeper.kill()
    task.end()


def command(pid: int) -> str:
    """Its command line; empty when it has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""
