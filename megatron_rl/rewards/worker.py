"""The process that runs verifiers: jobs come in on its standard input, outcomes go out on its standard output.

Started by `pool_worker.py` as `python -m megatron_rl.rewards.worker PARENT_PID`. The first frame names the components;
the answer to it is `{"ready": true}` or `{"error": message}`. It may be killed at any moment, and it never outlives its
parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import BinaryIO

from . import frames
from .evaluate import Evaluator
from .registry import BUILT_IN, RewardError

MEMORY_LIMIT = 4 << 30
"""Bytes of address space, where only built-in verifiers run: `9^{9^{9^9}}` must not take the node's memory."""
_PR_SET_PDEATHSIG = 1


def run(serve: Callable[[BinaryIO, BinaryIO], int]) -> int:
    """What every process of a pool does: `serve` frames of its input until that ends. Returns the exit status."""
    die_with_parent(int(sys.argv[1]))
    # Slurm sends it to every process of a step; the pool ends its workers itself, with KILL.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = take_stdout()
    return serve(sys.stdin.buffer, answers)


def serve(jobs: BinaryIO, answers: BinaryIO) -> int:
    """Read components, then jobs, until the end of `jobs`."""
    first = frames.read(jobs)
    if first is None:
        return 0
    components = [(name, args) for name, args in first["components"]]
    if all(name in BUILT_IN for name, _ in components):
        _limit_memory()
    try:
        evaluate = Evaluator(components)
    except RewardError as error:
        _send(answers, {"error": str(error)})
        return 1
    _send(answers, {"ready": True})
    while (job := frames.read(jobs)) is not None:
        _send(answers, frames.reply(evaluate(job["response"], frames.record_of(job["record"]))))
    return 0


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def take_stdout() -> BinaryIO:
    """The pipe to the parent; whatever a verifier prints goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def _limit_memory() -> None:
    with contextlib.suppress(ValueError, OSError):  # the system's own limit is lower already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))


def _send(stream: BinaryIO, value: object) -> None:
    stream.write(frames.encode(value))
    stream.flush()


if __name__ == "__main__":
    sys.exit(run(serve))
