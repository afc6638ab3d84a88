"""Writes a conversion's files in bounded memory: atomic as a whole, resumable file by file. No format is known here.

    OUT/                     appears last, complete, by one rename
    .converting-OUT/         beside it until then
        journal.json         which conversion this is, and every finished file with its size and xxh3_128
        NAME                 finished; a rerun compares its hash and goes on behind it
        NAME.partial         being written, or left by a kill; written again

A rerun of the same command goes on; one of another command, or of changed sources, begins anew. The bytes written
depend neither on interruptions nor on the memory allowed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import torch
import xxhash
from torch import Tensor

from megatron_rl.files import sync, write_atomic
from megatron_rl.weights import WeightsError
from megatron_rl.weights.convert.tensors import BLOCK_BYTES, Rows, blocks, size_of

JOURNAL = "journal.json"
LEAST_MEMORY = 8 * BLOCK_BYTES
"""A block is several times in memory: its parts, joined, cast, cut into columns. More would not be faster."""
_RESERVE = 64 * 2**20
"""Bytes of disk beyond the tensors: headers, an index, the tokenizer."""


@dataclass(frozen=True)
class PlannedFile:
    """A file that is to be written: its name (with at most one folder), and its tensors in their order."""

    name: str
    tensors: tuple[Rows, ...]

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(size_of(tensor) for tensor in self.tensors)


class FileWriter(Protocol):
    """Puts blocks of tensors into one file, in the order of the plan."""

    def put(self, tensor: Rows, begin: int, data: Tensor) -> None:
        """Rows `begin` and following of `tensor`."""

    def record(self) -> Any:
        """What `Target.finish` must know about the file; anything that JSON can hold."""


class Target(Protocol):
    """A format that is written."""

    @property
    def files(self) -> Sequence[PlannedFile]:
        """In the order in which they are written."""

    def writer(self, file: PlannedFile, stream: IO[bytes]) -> FileWriter:
        """Begin a file."""

    def finish(self, folder: Path, records: Mapping[str, Any]) -> None:
        """Write what stands beside the planned files: an index, metadata, a tokenizer."""


class Progress(Protocol):
    """Is told about bytes; see `cli_convert`."""

    def advance(self, size: int) -> None:
        """So many bytes of tensors are written, or were there already."""


@dataclass(frozen=True)
class Options:
    """How to write."""

    max_memory: int
    """Bytes that tensors may take at once."""
    allow_nan: bool = False
    """Go on past numbers that are not finite."""


@dataclass
class Outcome:
    """What was done."""

    size: int = 0
    kept: int = 0
    """Bytes that an earlier, interrupted call had written."""
    not_finite: list[str] = field(default_factory=list)
    """Tensors with NaN or infinity."""


def run(target: Target, out: Path, identity: Mapping[str, Any], options: Options, progress: Progress) -> Outcome:
    """Write `target` to the directory `out`, which must not exist.

    Args:
        identity: what makes this conversion another one: verb, options, names, sizes and times of the source files.

    Raises:
        WeightsError: `out` exists or cannot be written, the disk is too small, the memory is too small, a tensor holds
            numbers that are not finite, or a source is damaged.
    """
    if options.max_memory < LEAST_MEMORY:
        raise WeightsError(
            f"--max-memory={options.max_memory / 2**20:.0f} MiB: at least {LEAST_MEMORY // 2**20} MiB are needed"
        )
    check_out(out)
    staging = out.with_name(f".converting-{out.name}")
    with _plain_errors(out), _alone(staging):
        journal = _Journal(staging, _fingerprint(target, identity))
        outcome = Outcome(kept=journal.kept)
        check_space(out, sum(file.size for file in target.files if file.name not in journal.files))
        for file in target.files:
            if file.name not in journal.files:
                journal.add(file.name, _write(target, file, staging, options, progress))
            else:
                progress.advance(file.size)
            outcome.size += file.size
            outcome.not_finite += journal.files[file.name]["not_finite"]
        target.finish(staging, {name: facts["record"] for name, facts in journal.files.items()})
        _complete(staging, out)
    return outcome


def check_out(out: Path) -> None:
    """Raises WeightsError where `out` exists already."""
    if out.exists() or out.is_symlink():
        raise WeightsError(f"{out}: exists already; give another directory, or move it away")


def check_space(out: Path, size: int) -> None:
    """Raises WeightsError when the file system of `out` has less than `size` bytes, and some more, to give."""
    there = out.absolute().parent
    while not there.exists():
        there = there.parent
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
def _alone(staging: Path) -> Iterator[None]:
    """Hold the staging directory against a second process with the same target."""
    staging.mkdir(parents=True, exist_ok=True)
    lock = os.open(staging, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise WeightsError(f"{staging}: another process is writing it; wait for that one, or end it") from None
    else:
        yield
    finally:
        os.close(lock)


def _fingerprint(target: Target, identity: Mapping[str, Any]) -> str:
    plan = [[file.name, [[t.name, list(t.shape), str(t.dtype)] for t in file.tensors]] for file in target.files]
    text = json.dumps({"identity": identity, "plan": plan}, sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode())


class _Journal:
    """The finished files of a staging directory; those changed since are forgotten, and all of another plan."""

    def __init__(self, staging: Path, plan: str) -> None:
        self._path, self._plan = staging / JOURNAL, plan
        self.files: dict[str, Any] = {}
        self.kept = 0
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            found = {}
        if found.get("plan") == plan:
            self.files = {name: facts for name, facts in found["files"].items() if _is_intact(staging / name, facts)}
            self.kept = sum(facts["size"] for facts in self.files.values())
        for path in staging.rglob("*"):
            if path.is_file() and path.relative_to(staging).as_posix() not in self.files:
                path.unlink()
        self._save()

    def add(self, name: str, facts: Any) -> None:
        self.files[name] = facts
        self._save()

    def _save(self) -> None:
        write_atomic(self._path, json.dumps({"plan": self._plan, "files": self.files}))


def _is_intact(path: Path, facts: Mapping[str, Any]) -> bool:
    if not path.is_file() or path.stat().st_size != facts["size"]:
        return False
    state, buffer = xxhash.xxh3_128(), bytearray(8 * 2**20)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(memoryview(buffer)[:count])
    return state.hexdigest() == facts["xxh3_128"]


class _Hashing:
    """A stream that remembers the hash of what was written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.state = file, xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        self.state.update(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()


def _write(target: Target, file: PlannedFile, staging: Path, options: Options, progress: Progress) -> dict[str, Any]:
    partial = staging / f"{file.name}.partial"
    partial.parent.mkdir(exist_ok=True)
    not_finite: list[str] = []
    with open(partial, "wb", buffering=0) as raw:
        stream = _Hashing(_Whole(raw))  # type: ignore[arg-type]
        writer = target.writer(file, stream)  # type: ignore[arg-type]
        for tensor, begin, data in _all_blocks(file.tensors):
            if not _is_finite(data) and tensor.name not in not_finite:
                if not options.allow_nan:
                    raise WeightsError(
                        f"{tensor.name}: NaN or infinity in rows {begin} to {begin + len(data)}; the source is not "
                        "usable as it is: use an earlier checkpoint, or --allow-nan to convert it all the same"
                    )
                not_finite.append(tensor.name)
            writer.put(tensor, begin, data)
            progress.advance(data.numel() * data.dtype.itemsize)
        record = writer.record()
        os.fsync(raw.fileno())
        size = raw.tell()
    os.replace(partial, staging / file.name)
    return {"size": size, "xxh3_128": stream.state.hexdigest(), "record": record, "not_finite": not_finite}


class _Whole:
    """An unbuffered file whose `write` takes everything it is given."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        while view:
            view = view[self._raw.write(view) :]
        return size

    def tell(self) -> int:
        return self._raw.tell()

    def flush(self) -> None:
        """Nothing is held back."""


def _all_blocks(tensors: Sequence[Rows]) -> Iterator[tuple[Rows, int, Tensor]]:
    """All blocks of all tensors, in order.

    No thread reads ahead: the kernel is asked to (`read_elements`), and a second thread would keep freed memory of its
    own, several times what the blocks take.
    """
    for tensor in tensors:
        for begin, end in blocks(tensor):
            yield tensor, begin, tensor.rows(begin, end)


def _is_finite(data: Tensor) -> bool:
    if not data.dtype.is_floating_point or data.numel() == 0 or data.dtype.itemsize == 1:
        return True
    # One pass without a temporary: NaN comes through as both, infinity as one of them.
    low, high = torch.aminmax(data)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _complete(staging: Path, out: Path) -> None:
    for path in [*staging.rglob("*"), staging]:
        sync(path)
    # Without its journal the directory would be written anew: nothing that takes time stands between these two lines.
    (staging / JOURNAL).unlink()
    os.replace(staging, out)
    for folder in (out, out.parent):
        sync(folder)
