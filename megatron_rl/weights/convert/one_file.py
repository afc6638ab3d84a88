"""Writes one file of a conversion, block by block: its numbers are checked, hashed and on the disk when it appears."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import xxhash
from torch import Tensor

from megatron_rl.weights import WeightsError
from megatron_rl.weights.convert.tensors import Rows, blocks, size_of
from megatron_rl.weights.finite import is_finite

Advance = Callable[[int], object]
"""Is told that so many more bytes of tensors were handled."""
_STEP_BYTES, _SEND_BYTES, _PENDING_BYTES = 2**20, 16 * 2**20, 48 * 2**20


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


def write_file(
    begin: Callable[[PlannedFile, IO[bytes]], FileWriter],
    file: PlannedFile,
    path: Path,
    allow_nan: bool,
    advance: Advance,
) -> dict[str, Any]:
    """Write `file` to `path`, which appears complete; returns its size, hash, record and tensors that are not finite.

    Raises:
        WeightsError: a source is damaged, or, unless `allow_nan`, a number is not finite.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    not_finite: list[str] = []
    with open(partial, "wb", buffering=0) as raw:
        stream = _Stream(raw)
        writer = begin(file, stream)  # type: ignore[arg-type]
        for tensor, first, data in _all_blocks(file.tensors):
            if not is_finite(data) and tensor.name not in not_finite:
                if not allow_nan:
                    raise WeightsError(
                        f"{tensor.name}: NaN or infinity in rows {first} to {first + len(data)}; the source is not "
                        "usable as it is: use an earlier checkpoint, or --allow-nan to convert it all the same"
                    )
                not_finite.append(tensor.name)
            writer.put(tensor, first, data)
            advance(data.numel() * data.dtype.itemsize)
        record = writer.record()
        os.fsync(raw.fileno())
        os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = raw.tell()
    os.replace(partial, path)
    return {"size": size, "xxh3_128": stream.state.hexdigest(), "record": record, "not_finite": not_finite}


class _Stream:
    """An unbuffered file whose `write` takes all it is given and hashes it, and which does not stay in the page cache.

    Written in steps of a megabyte: the kernel takes several times as long for the pages of larger ones. What was
    written is sent to the disk meanwhile, and given back when it is there, so that the last fsync waits for little and
    the files of others stay in memory.
    """

    def __init__(self, raw: Any) -> None:
        self._raw, self._sent, self.state = raw, 0, xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        self.state.update(data)
        view = memoryview(data).cast("B")
        size = len(view)
        while view:
            view = view[self._raw.write(view[:_STEP_BYTES]) :]
        if (end := self._raw.tell()) >= self._sent + _SEND_BYTES:
            # Pages that are still on their way are passed over, hence once more with those before.
            begin = max(0, self._sent - _PENDING_BYTES)
            os.posix_fadvise(self._raw.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)
            self._sent = end
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
