"""Runs one function as several real ranks (processes over gloo) and returns what each of them returned; holds no tests.

Importing torch and Megatron costs each process seconds: let ONE launch serve many checks, by a function that returns a
dict of results which the tests then look at one by one (a module-scoped fixture is the place for the launch).
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.05


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
        ranks = [_start(folder, rank, world_size, port) for port in [_free_port()] for rank in range(world_size)]
        try:
            _wait(ranks, folder, time.monotonic() + timeout, timeout)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(folder: Path, rank: int, world_size: int, port: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    with (folder / f"output-{rank}").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.launch", str(folder), str(rank)],
            env=environment,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path, deadline: float, timeout: float) -> None:
    while any(process.poll() is None for process in ranks):
        # A rank that failed by itself writes its traceback; the others then fail because their peer is gone.
        failed = sorted(folder.glob("failure-*"), key=lambda path: path.stat().st_mtime_ns)
        if failed or any(process.poll() for process in ranks):
            break
        if time.monotonic() > deadline:
            raise RankError(f"ranks did not finish in {timeout:.0f} s\n{_outputs(folder)}")
        time.sleep(POLL_S)
    failed = sorted(folder.glob("failure-*"), key=lambda path: path.stat().st_mtime_ns)
    if failed:
        raise RankError(f"rank {failed[0].name.split('-')[1]} failed\n{failed[0].read_text()}")
    codes = [process.poll() for process in ranks]
    if any(codes):
        raise RankError(f"exit codes {codes}\n{_outputs(folder)}")


def _outputs(folder: Path, characters: int = 3000) -> str:
    return "\n".join(
        f"--- {path.name}\n{path.read_text(errors='replace')[-characters:]}" for path in sorted(folder.glob("output-*"))
    )


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name("." + path.name)
    temporary.write_bytes(content)
    temporary.replace(path)


def _run_rank(folder: Path, rank: int) -> None:
    import importlib

    module, name, args = pickle.loads((folder / "call").read_bytes())
    try:
        result = getattr(importlib.import_module(module), name)(*args)
    except BaseException:
        _write(folder / f"failure-{rank}", traceback.format_exc().encode())
        raise
    _write(folder / f"result-{rank}", pickle.dumps(result))


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]), int(sys.argv[2]))
