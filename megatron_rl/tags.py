"""Finding processes by a name in their environment. Who starts and ends them: `cluster/keeper.py`, pools of workers.

What a process starts inherits the name, setsid or not. That of a task is `RUN/ROLE/NODE/RANK`; RUN is unique to one
attempt of one job. That of a worker is any word.
"""

from __future__ import annotations

import os
from pathlib import Path

TAG = "MEGATRON_RL_TASK"
WORKER = "MEGATRON_RL_WORKER"


def tagged(prefix: str, variable: str = TAG) -> list[int]:
    """Ids of the living processes on this machine whose tag is `prefix` or lies below it; not this process."""
    return [pid for pid in all_pids() if pid != os.getpid() and _lies_below(tag_of(pid, variable), prefix)]


def tag_of(pid: int, variable: str = TAG) -> str | None:
    """The tag of a process, None when it has none, has ended, or belongs to somebody else."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return next((v.partition(b"=")[2].decode() for v in variables if v.startswith(f"{variable}=".encode())), None)
    except OSError:
        return None


def descendants(ancestor: int) -> list[int]:
    """Ids of the living processes that descend from a process."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        parent = _parent(pid)
        if parent is not None:
            children.setdefault(parent, []).append(pid)
    found = list(children.get(ancestor, ()))
    for pid in found:  # which grows on the way
        found += children.get(pid, ())
    return found


def _parent(pid: int) -> int | None:
    """None for a process that has ended, also when nobody has taken note of it yet."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(parent)


def _lies_below(tag: str | None, prefix: str) -> bool:
    return tag is not None and (tag == prefix or tag.startswith(f"{prefix}/"))


def all_pids() -> list[int]:
    """Every process of this machine, or of this container."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
