"""Runs one function as several real ranks (processes over gloo) and returns what each of them returned; holds no tests.

Importing torch and Megatron costs a process seconds of CPU. So the ranks of all launches of a pytest process are forked
from one nursery, a process that has imported both and does nothing else; with CUDA, which does not survive a fork,
ranks start as fresh interpreters instead. Still let ONE launch serve many checks, by a function that returns a
dict of results which the tests then look at one by one (a module-scoped fixture is the place for the launch).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.addresses import free_port
from megatron_rl.cluster.bootstrap import Place, find_place

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.05
START_S = 180
PRELOADED = (
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel",
    "megatron_rl.policy.model",
)


class RankError(AssertionError):
    """A rank failed or the deadline passed; the message holds the rank's traceback or the end of its output."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `function(*args)` in `world_size` new processes; return the results, by rank.

    The processes have RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set, one thread each, and the working
    directory of the repository; the function itself calls `policy.distributed.initialize`. Results, like arguments,
    must pickle (tensors do).

    Args:
        function: defined at the top level of an importable module.
        timeout: seconds for the whole launch; all ranks are killed when it passes or when one of them fails.

    Raises:
        RankError: with the traceback of the first rank that failed.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    try:
        (folder / "call").write_bytes(pickle.dumps((function.__module__, function.__qualname__, args)))
        pids = _nursery().start(folder, world_size)
        try:
            _wait(folder, world_size, timeout)
        finally:
            _kill(folder, pids)
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(folder: Path, world_size: int, timeout: float) -> None:
    """Until all ranks have returned; raises as soon as one of them cannot any more."""
    deadline = time.monotonic() + timeout
    while True:
        # A rank that failed by itself writes its traceback; the others then fail because their peer is gone.
        failed = sorted(folder.glob("failure-*"), key=lambda path: path.stat().st_mtime_ns)
        if failed:
            raise RankError(f"rank {failed[0].name.split('-')[1]} failed\n{failed[0].read_text()}")
        codes = [_exit_code(folder, rank) for rank in range(world_size)]
        if any(codes):
            raise RankError(f"exit codes {codes}\n{_outputs(folder)}")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise RankError(f"ranks did not finish in {timeout:.0f} s\n{_outputs(folder)}")
        time.sleep(POLL_S)


def _exit_code(folder: Path, rank: int) -> int | None:
    file = folder / f"exit-{rank}"
    return int(file.read_text()) if file.exists() else None


def _kill(folder: Path, pids: list[int]) -> None:
    for rank, pid in enumerate(pids):
        while _exit_code(folder, rank) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)


def _outputs(folder: Path, characters: int = 3000) -> str:
    return "\n".join(
        f"--- {path.name}\n{path.read_text(errors='replace')[-characters:]}" for path in sorted(folder.glob("output-*"))
    )


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name("." + path.name)
    temporary.write_bytes(content)
    temporary.replace(path)


# ------------------------------------------------------------------------------------------- the nursery, from outside


class _Nursery:
    """The process that ranks are forked from. It ends, with its ranks, when this process ends."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.launch", "nursery"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # an interrupt from the keyboard is for us; it ends when we close its input
        )
        atexit.register(self.close)

    def start(self, folder: Path, world_size: int) -> list[int]:
        """Start the ranks of one launch; returns their process ids."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"folder": str(folder), "world_size": world_size}) + "\n")
        self.process.stdin.flush()
        readable, _, _ = select.select([self.process.stdout], [], [], START_S)
        answer = self.process.stdout.readline() if readable else ""
        if not answer:
            raise RankError(f"no ranks after {START_S} s: importing {', '.join(PRELOADED)} failed or hangs, see above")
        return list(json.loads(answer))

    def close(self) -> None:
        """Let it end: the closed pipe tells it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@functools.cache
def _nursery() -> _Nursery:
    return _Nursery()


def this_rank() -> Place:
    """What a function called by `run_ranks` hands to `policy.distributed.initialize`."""
    return find_place(os.environ, folder=Path())


# ------------------------------------------------------------------------------------------ the nursery, from inside


def _tend() -> None:
    """Fork ranks as asked on standard input, write down how they ended, and take them along at the end of input."""
    fork_only = _preload()
    children: dict[int, Path] = {}
    try:
        while True:
            readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
            if readable:
                line = sys.stdin.readline()
                if not line:
                    return
                order = json.loads(line)
                folder, world_size, port = Path(order["folder"]), order["world_size"], free_port()
                ranks = {_fork(folder, rank, world_size, port, fork_only): rank for rank in range(world_size)}
                children |= {pid: folder / f"exit-{rank}" for pid, rank in ranks.items()}
                print(json.dumps(list(ranks)), flush=True)
            _reap(children)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def _preload() -> bool:
    """Import what ranks need, in the order in which a training process does; False where CUDA forbids forking."""
    import torch

    from megatron_rl import cpu_backend

    if torch.cuda.is_available():
        return False
    cpu_backend.install()
    for module in PRELOADED:
        importlib.import_module(module)
    return True


def _reap(children: dict[int, Path]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        file = children.pop(pid)
        if file.parent.exists():
            _write(file, str(os.waitstatus_to_exitcode(status)).encode())


def _fork(folder: Path, rank: int, world_size: int, port: int, fork_only: bool) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if not fork_only:
            os.execv(sys.executable, [sys.executable, "-m", "tests.parallel.launch", str(folder), str(rank)])
        _run_rank(folder, rank)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # not the nursery's own clean-up


def _run_rank(folder: Path, rank: int) -> None:
    module, name, args = pickle.loads((folder / "call").read_bytes())
    try:
        result = getattr(importlib.import_module(module), name)(*args)
    except BaseException:
        _write(folder / f"failure-{rank}", traceback.format_exc().encode())
        raise
    _write(folder / f"result-{rank}", pickle.dumps(result))


if __name__ == "__main__":
    if sys.argv[1] == "nursery":
        _tend()
    else:
        _run_rank(Path(sys.argv[1]), int(sys.argv[2]))
