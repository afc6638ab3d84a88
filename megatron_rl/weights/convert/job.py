"""Writes a conversion's files in bounded memory: atomic as a whole, resumable file by file. No format is known here.

    OUT/                     appears last, complete, by one rename
    .converting-OUT/         beside it until then
        journal-RANK.json    which conversion this is, and every finished file with its size and xxh3_128
        NAME                 finished; a rerun compares its hash and goes on behind it
        NAME.partial         being written, or left by a kill; written again

A rerun of the same command goes on, with any number of ranks; one of another command, or of changed sources, begins
anew. The bytes written depend neither on interruptions nor on ranks nor on the memory allowed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import xxhash

from megatron_rl.files import sync, try_lock
from megatron_rl.weights import WeightsError
from megatron_rl.weights.convert.journal import Journal, check_out, forget, is_intact, take_over
from megatron_rl.weights.convert.one_file import Advance, FileWriter, PlannedFile, write_file
from megatron_rl.weights.convert.team import ALONE, Team, shares
from megatron_rl.weights.convert.tensors import BLOCK_BYTES

LEAST_MEMORY = 8 * BLOCK_BYTES
"""A block is several times in memory: its parts, joined, cast, cut into columns. More would not be faster."""
_RESERVE = 64 * 2**20
"""Bytes of disk beyond the tensors: headers, an index, the tokenizer."""


class Target(Protocol):
    """A format that is written."""

    @property
    def files(self) -> Sequence[PlannedFile]:
        """In the order in which they are written."""

    def writer(self, file: PlannedFile, stream: IO[bytes]) -> FileWriter:
        """Begin a file."""

    def finish(self, folder: Path, records: Mapping[str, Any]) -> None:
        """Write what stands beside the planned files: an index, metadata, a tokenizer."""


@dataclass(frozen=True)
class Outcome:
    """What was done."""

    kept: int
    """Bytes that an earlier, interrupted call had written."""
    not_finite: list[str]
    """Tensors with NaN or infinity."""


def run(
    target: Target,
    out: Path,
    identity: Mapping[str, Any],
    advance: Advance,
    allow_nan: bool = False,
    team: Team = ALONE,
) -> Outcome:
    """Write `target` to the directory `out`, which must not exist. Collective; all ranks return the same.

    Args:
        identity: what makes this conversion another one: verb, options, names, sizes and times of the source files.
        allow_nan: go on past numbers that are not finite.

    Raises:
        WeightsError: `out` exists or cannot be written, the disk is too small, a tensor holds numbers that are not
            finite, or a source is damaged; on this rank or on another one.
    """
    staging, plan = out.with_name(f".converting-{out.name}"), _fingerprint(target, identity)
    with team.failing_together(), _plain_errors(out), _alone(staging, out, team.rank):
        known = team.from_first("begun", lambda: _begin(staging, plan, out, target))
        said = team.from_first("plan", lambda: plan)
        if said != plan:
            raise WeightsError(
                f"rank {team.rank} sees other source files than rank 0, or was given another command; all nodes must "
                "see the same directories"
            )
        told = _Told(advance, team)
        done = _write_share(target, staging, Journal(staging, plan, team.rank, known), allow_nan, told.advance, team)
        facts: dict[str, Any] = {}
        for part in team.of_all("written", done):
            facts |= part
        team.from_first("finished", lambda: _finish(target, staging, out, facts))
        team.leave()
    advance(sum(file.size for file in target.files) - told.size)
    return Outcome(
        kept=sum(found["size"] for name, found in facts.items() if found == known.get(name)),
        not_finite=[name for file in target.files for name in facts[file.name]["not_finite"]],
    )


def _begin(staging: Path, plan: str, out: Path, target: Target) -> dict[str, Any]:
    known = take_over(staging, plan)
    check_space(out, sum(file.size for file in target.files if file.name not in known))
    return known


def _write_share(
    target: Target, staging: Path, journal: Journal, allow_nan: bool, advance: Advance, team: Team
) -> dict[str, Any]:
    """Verify or write this rank's files; returns their facts."""
    known = dict(journal.files)
    # Ranks share evenly what is to be compared with its hash, and what is to be written.
    groups = [[file for file in target.files if (file.name in known) is is_known] for is_known in (True, False)]
    own = [
        group[position] for group in groups for position in shares([file.size for file in group], team.size)[team.rank]
    ]
    for file in own:
        if file.name in known and is_intact(staging / file.name, known[file.name], advance):
            advance(file.size)
        else:
            facts = write_file(target.writer, file, staging / file.name, allow_nan, advance)
            journal.add(file.name, facts)
    return {file.name: journal.files[file.name] for file in own}


def _finish(target: Target, staging: Path, out: Path, facts: Mapping[str, Any]) -> None:
    for file in target.files:
        path = staging / file.name
        if not path.is_file() or path.stat().st_size != facts[file.name]["size"]:
            raise WeightsError(
                f"{path}: another rank has written it, but rank 0 does not see all of it; all nodes must share the "
                "file system of the target"
            )
    target.finish(staging, {file.name: facts[file.name]["record"] for file in target.files})
    _complete(staging, out)


class _Told:
    """Progress of all ranks, told by this one."""

    def __init__(self, advance: Advance, team: Team) -> None:
        self._advance, self._team, self.size = advance, team, 0

    def advance(self, size: int) -> None:
        told = self._team.advance(size)
        self.size += told
        if told:
            self._advance(told)


def existing_parent(out: Path) -> Path:
    """The innermost directory above `out` that is there already."""
    return next(folder for folder in out.absolute().parents if folder.exists())


def check_space(out: Path, size: int) -> None:
    """Raises WeightsError when the file system of `out` has less than `size` bytes, and some more, to give."""
    there = existing_parent(out)
    free = shutil.disk_usage(there).free
    if free < size + _RESERVE:
        raise WeightsError(
            f"{there}: {free / 2**30:.2f} GiB free where {(size + _RESERVE) / 2**30:.2f} GiB are needed; make room, or "
            "give a directory on another file system"
        )


@contextmanager
def _plain_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeightsError(
            f"{out}: cannot be written ({error}); make room or fix the permissions, then give the same command again: "
            "it goes on with the first file that is not finished"
        ) from error


@contextmanager
def _alone(staging: Path, out: Path, rank: int) -> Iterator[None]:
    """On rank 0, hold the staging directory against another conversion with the same target."""
    if rank > 0:
        yield
        return
    check_out(out)
    staging.mkdir(parents=True, exist_ok=True)
    lock = os.open(staging, os.O_RDONLY)
    try:
        if not try_lock(lock):
            raise WeightsError(f"{staging}: another process is writing it; wait for that one, or end it")
        try:
            yield
        except BaseException:
            with suppress(OSError):  # it holds what the same command will go on with
                staging.rmdir()
            raise
    finally:
        os.close(lock)


def _fingerprint(target: Target, identity: Mapping[str, Any]) -> str:
    plan = [[file.name, [[t.name, list(t.shape), str(t.dtype)] for t in file.tensors]] for file in target.files]
    text = json.dumps({"identity": identity, "plan": plan}, sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode())


def _complete(staging: Path, out: Path) -> None:
    for path in [*staging.rglob("*"), staging]:
        sync(path)
    # Without its journals the directory would be written anew: nothing that takes time stands between these two lines.
    forget(staging)
    os.replace(staging, out)
    for folder in (out, out.parent):
        sync(folder)
