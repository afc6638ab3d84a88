"""What a conversion will read and write on each rank, and how long that takes; the weights need not be there.

The time comes from a trial: some blocks go the whole way from the source's disk to the target's.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.files import sync
from megatron_rl.weights import fp8
from megatron_rl.weights.convert.job import Target
from megatron_rl.weights.convert.one_file import PlannedFile, write_file
from megatron_rl.weights.convert.team import shares
from megatron_rl.weights.convert.tensors import Changed, Joined, Quantised, Rows, blocks, size_of
from megatron_rl.weights.convert.torch_dist import Plane
from megatron_rl.weights.convert.torch_dist_target import Slab

TRIAL_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Share:
    """One rank's part of a conversion.

    Attributes:
        files: that it writes.
        written: bytes of tensors.
        reads: requests to the source's files.
        read: bytes that these ask for.
    """

    files: int
    written: int
    reads: int
    read: int


def rank_shares(target: Target, ranks: int) -> list[Share]:
    """Of every rank, in order."""
    parts = shares([file.size for file in target.files], ranks)
    return [_share([target.files[position] for position in positions]) for positions in parts]


def _share(files: Sequence[PlannedFile]) -> Share:
    reads = read = 0
    for file in files:
        for tensor in file.tensors:
            for begin, end in blocks(tensor):
                for count, size in _reads(tensor, begin, end):
                    reads, read = reads + count, read + size
    return Share(len(files), sum(file.size for file in files), reads, read)


def _reads(tensor: Rows, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Requests and bytes for some rows, one pair for each stored tensor that they come from."""
    if isinstance(tensor, (Joined, Changed, Quantised, Slab)):
        for part in tensor.needs(begin, end):
            yield from _reads(part.tensor, part.begin, part.end)
        if isinstance(tensor, Joined) and tensor.unused is not None and end == tensor.shape[0]:
            yield from _reads(tensor.unused.tensor, tensor.unused.begin, tensor.unused.end)
    elif isinstance(tensor, fp8.Dequantised):
        count = end - begin
        yield 1, count * tensor.shape[1]
        yield 1, 4 * math.prod(fp8.scale_shape(count, tensor.shape[1]))
    else:
        count = tensor.num_reads(begin, end) if isinstance(tensor, Plane) else 1
        yield count, size_of(tensor) * (end - begin) // max(1, tensor.shape[0])


def seconds_per_byte(target: Target, folder: Path) -> float:
    """Of one process that writes the plan's first `TRIAL_BYTES` to a file in `folder`, which is deleted again.

    Raises:
        WeightsError, OSError: the source cannot be read, or the folder not be written.
    """
    path, trial, began = folder / f".converting-trial-{os.getpid()}", _Trial(), time.monotonic()
    partial = path.with_name(f"{path.name}.partial")
    try:
        write_file(target.writer, target.files[0], path, True, trial.advance)
    except _Enough:
        sync(partial)
    finally:
        for left in (path, partial):
            left.unlink(missing_ok=True)
    return (time.monotonic() - began) / max(1, trial.size)


class _Enough(Exception):
    """The trial has seen its bytes."""


class _Trial:
    def __init__(self) -> None:
        self.size = 0

    def advance(self, size: int) -> None:
        self.size += size
        if self.size >= TRIAL_BYTES:
            raise _Enough
