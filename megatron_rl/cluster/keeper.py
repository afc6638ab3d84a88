"""One task of a Slurm step: runs the role's process, passes signals on, and leaves nothing of it behind.

    srun -> keeper -> role (its environment holds TAG) -> whatever it starts
             '- guard (on its own): waits for the keeper's end, then does the same cleaning

Waits for: the role's end, without a deadline. What a signal to the step means:

    --on-stop pass    TERM and USR2 are passed on: a trainer rank saves and leaves                         (trainer)
    --on-stop end     TERM and USR2 are left alone, since the trainer still needs this role    (controller, engines)
                      to save; USR1, which only the batch script sends here, ends the role: INT, then KILL

Where Slurm tracks processes by parenthood, a child that called setsid and lost its parent is out of its reach. So the
keeper is the parent of all that lose theirs: Slurm finds them below it, and at the end it kills them itself. When the
keeper alone is killed, the guard kills what carries the tag. Standard library only: it must start in a moment.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from megatron_rl.tags import TAG, descendants, tagged

from .bootstrap import task_of_step
from .started import BootstrapError

PR_SET_CHILD_SUBREAPER = 36
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)
STOP, END = (signal.SIGTERM, signal.SIGUSR2), signal.SIGUSR1


def keep(argv: Sequence[str], tag: str, on_stop: str, patience_s: float) -> int:
    """Run `argv` to its end. Returns its exit code, 128 + n when signal n ended it."""
    start_guard(tag)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    role: list[int] = []
    early: list[int] = []

    def receive(number: int, _: FrameType | None) -> None:
        if role:
            _react(role[0], number, on_stop, patience_s)
        else:
            early.append(number)

    for number in (*STOP, END):
        signal.signal(number, receive)
    prepare = functools.partial(_prepare, on_stop)
    child = subprocess.Popen(argv, env={**os.environ, TAG: tag}, stdin=subprocess.DEVNULL, preexec_fn=prepare)
    role.append(child.pid)
    for missed in early:
        _react(child.pid, missed, on_stop, patience_s)
    code = _wait(child)
    kill_rest(tag)
    return code if code >= 0 else 128 - code


def _prepare(on_stop: str) -> None:
    """In the role's process before exec."""
    # Where only ancestors may look into a process, py-spy (`stacks.py`), which is none, may look into this one.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY)
    if on_stop == "end":  # such a signal reaches every process of the step, which must not die of it
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)


def _wait(child: subprocess.Popen[bytes]) -> int:
    """The role's exit code; whatever else became our child and ended is taken note of on the way."""
    while True:
        pid, status = os.wait()
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return child.returncode


def _react(role: int, number: int, on_stop: str, patience_s: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        if on_stop == "pass" and number in STOP:
            os.kill(role, number)
        elif on_stop == "end" and number == END:
            os.kill(role, signal.SIGINT)
            signal.signal(signal.SIGALRM, lambda *_: os.kill(role, signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, patience_s)


def start_guard(tag: str) -> None:
    """A process that outlives this one and then kills what carries `tag`. Not our descendant, else it would not."""
    reader, writer = os.pipe()
    if os.fork():
        os.close(reader)
        os.wait()
        os.set_inheritable(writer, False)
        return  # `writer` is closed by the end of this process, however that comes
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(writer)
    for number in (*STOP, END, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # else Slurm waits for the end of the task's output
        os.dup2(null, descriptor)
    os.read(reader, 1)
    kill_rest(tag)
    os._exit(0)


def kill_rest(tag: str) -> None:
    """KILL to every process with this tag and to all that descend from us, until there is none: they may be forking."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for _ in range(100):
        pids = {*tagged(tag), *descendants(os.getpid())}
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m megatron_rl.cluster.keeper --role NAME --on-stop end|pass -- COMMAND...`, as a task of a step."""
    parser = argparse.ArgumentParser(description="One task of a Slurm step; the batch script starts it.")
    parser.add_argument("--run", required=True, help="name of the attempt, unique among all runs")
    parser.add_argument("--role", required=True)
    parser.add_argument("--on-stop", choices=("pass", "end"), required=True)
    parser.add_argument("--patience", type=float, default=30.0, help="seconds from INT to KILL")
    parser.add_argument("command", nargs="+")
    words = parser.parse_args(argv)
    try:
        node, task = task_of_step(os.environ)
    except BootstrapError as error:
        sys.exit(f"error: {error}")
    tag = f"{words.run}/{words.role}/{node}/{task}"
    sys.exit(keep(words.command, tag, words.on_stop, words.patience))


if __name__ == "__main__":
    main()
