"""Where the processes of a hung attempt stand on this node: one file of Python stacks for each, by py-spy.

`python -m megatron_rl.cluster.stacks RUN FOLDER`, one task on every node of the attempt, in a step of its own: the
processes may be stopped or stuck in a collective, so nothing is asked of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_rl.tags import tag_of, tagged

from .bootstrap import task_of_step

DEADLINE_S = 30.0
"""For one process; a large one takes py-spy a second or two."""


def dump_stacks(run: str, folder: Path) -> list[Path]:
    """Write FOLDER/stacks-ROLE-NODE-RANK-PID.txt for every process of attempt `run` on this node."""
    node, _ = task_of_step(os.environ)
    mine = [(pid, tag.split("/")) for pid in tagged(run) if (tag := tag_of(pid)) and tag.split("/")[-2] == node]
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda found: _dump(found[0], found[1], folder), mine))


def _dump(pid: int, tag: list[str], folder: Path) -> Path:
    path = folder / f"stacks-{'-'.join(tag[-3:])}-{pid}.txt"
    try:
        # Without pausing it: a process that was stopped stays as it is, and one that runs is read as it runs.
        done = subprocess.run(
            [_py_spy(), "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True, timeout=DEADLINE_S
        )
        text = done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        text = f"py-spy could not look at process {pid}: {error}\n"
    path.write_text(f"{_state(pid)}\n{text}")
    return path


def _py_spy() -> str:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy") or "py-spy"


def _state(pid: int) -> str:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(line for line in lines if line.startswith("State"))
    except (OSError, StopIteration):
        return "State: ended"


if __name__ == "__main__":
    run, folder = sys.argv[1:]
    for file in dump_stacks(run, Path(folder)):
        print(file)
