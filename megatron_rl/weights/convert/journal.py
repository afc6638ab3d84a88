"""The finished files of a directory that is being written, and their hashes: what a rerun need not write again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from megatron_rl.files import json_object, write_atomic
from megatron_rl.weights import WeightsError
from megatron_rl.weights.convert.one_file import Advance

_PATTERN = "journal-*.json"
_BUFFER_BYTES = 8 * 2**20


class Journal:
    """One rank's: which conversion this is, and the facts of every file known to be finished, by name."""

    def __init__(self, staging: Path, plan: str, rank: int, files: Mapping[str, Any]) -> None:
        self._path, self._plan = staging / f"journal-{rank:05d}.json", plan
        self.files = dict(files)
        self._save()

    def add(self, name: str, facts: Any) -> None:
        """`facts` is anything that JSON can hold; `is_intact` needs its `size` and `xxh3_128`."""
        self.files[name] = facts
        self._save()

    def _save(self) -> None:
        write_atomic(self._path, json.dumps({"plan": self._plan, "files": self.files}))


def check_out(out: Path) -> None:
    """Raises WeightsError where `out` exists already."""
    if out.exists() or out.is_symlink():
        raise WeightsError(f"{out}: exists already; give another directory, or move it away")


def take_over(staging: Path, plan: str) -> dict[str, Any]:
    """What earlier calls, of any number of ranks, have finished of this plan; every other file there is deleted."""
    files: dict[str, Any] = {}
    for path in staging.glob(_PATTERN):
        try:
            found = json_object(path.read_bytes())
        except (OSError, ValueError):
            found = {}
        if found.get("plan") == plan:
            files |= found["files"]
        else:
            path.unlink()
    files = {name: facts for name, facts in files.items() if (staging / name).is_file()}
    kept = {staging / name for name in files} | set(staging.glob(_PATTERN))
    for path in staging.rglob("*"):
        if path.is_file() and path not in kept:
            path.unlink()
    return files


def forget(staging: Path) -> None:
    """Delete all journals. What is not renamed now will be written anew."""
    for path in staging.glob(_PATTERN):
        path.unlink()


def is_intact(path: Path, facts: Mapping[str, Any], advance: Advance) -> bool:
    """Whether a file has the recorded size and hash; `advance` is called meanwhile."""
    if not path.is_file() or path.stat().st_size != facts["size"]:
        return False
    state, buffer = xxhash.xxh3_128(), bytearray(_BUFFER_BYTES)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(memoryview(buffer)[:count])
            advance(0)
    return state.hexdigest() == facts["xxh3_128"]
