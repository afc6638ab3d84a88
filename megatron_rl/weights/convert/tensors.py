"""What every source and every view offers: tensors of which rows are read on demand. No file format is known here."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from megatron_rl.weights import fp8
from megatron_rl.weights.safetensors_file import FLOATS

BLOCK_BYTES = 16 * 2**20
"""Read, checked and written at a time. Larger blocks do not stay in the allocator, and cost page faults every time."""


class Rows(Protocol):
    """A tensor that is not in memory."""

    @property
    def name(self) -> str:
        """As in its checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""

    @property
    def dtype(self) -> torch.dtype:
        """Of what `rows` returns."""

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows `begin` to `end` of the first dimension, contiguous."""


@dataclass(frozen=True)
class Part:
    """Rows `begin` to `end` of a tensor."""

    tensor: Rows
    begin: int
    end: int


@dataclass(frozen=True)
class Joined:
    """Parts of tensors, one below the other, then rows of zeros until `shape` is full."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    unused: Part | None = None
    """What is stored beside them and left out; it is read with the last row, since checksums are of all."""

    def rows(self, begin: int, end: int) -> Tensor:
        if self.unused is not None and end == self.shape[0]:
            self.unused.tensor.rows(self.unused.begin, self.unused.end)
        found = [part.tensor.rows(part.begin, part.end) for part in self.needs(begin, end)]
        if missing := end - max(begin, min(self._bounds[-1], end)):
            found.append(torch.zeros(missing, *self.shape[1:], dtype=self.dtype))
        return found[0] if len(found) == 1 else torch.cat(found)

    @cached_property
    def _bounds(self) -> list[int]:
        """Row at which each part begins, and the row behind the last one."""
        return list(accumulate((part.end - part.begin for part in self.parts), initial=0))

    def needs(self, begin: int, end: int) -> Iterator[Part]:
        """What these rows are made of."""
        for number in range(bisect_right(self._bounds, begin) - 1, len(self.parts)):
            part, position = self.parts[number], self._bounds[number]
            if position >= end:
                return
            yield Part(
                part.tensor,
                part.begin + max(begin - position, 0),
                part.begin + min(end - position, part.end - part.begin),
            )


@dataclass(frozen=True)
class Changed:
    """Tensors of one shape, put through a function block by block: a cast, a mean."""

    name: str
    dtype: torch.dtype
    of: tuple[Rows, ...]
    function: Callable[[Sequence[Tensor]], Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of[0].shape

    def rows(self, begin: int, end: int) -> Tensor:
        return self.function([tensor.rows(begin, end) for tensor in self.of])

    def needs(self, begin: int, end: int) -> Iterator[Part]:
        """As of `Joined`."""
        return (Part(tensor, begin, end) for tensor in self.of)


def cast_rows(tensor: Rows, dtype: torch.dtype | None) -> Rows:
    """The tensor in another dtype, if it is one of floating point and not of that dtype (None: any) already."""
    if dtype in (None, tensor.dtype) or tensor.dtype not in (*FLOATS, torch.float64):
        return tensor
    return Changed(tensor.name, dtype, (tensor,), lambda blocks: blocks[0].to(dtype))


@dataclass(frozen=True)
class Quantised:
    """A matrix as blocks of fp8 numbers (`fp8`), or the scales of these."""

    of: Rows
    is_scales: bool = False

    @property
    def name(self) -> str:
        return self.of.name + (fp8.SUFFIX if self.is_scales else "")

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.of.shape
        return fp8.scale_shape(rows, columns) if self.is_scales else (rows, columns)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.is_scales else fp8.FP8

    def rows(self, begin: int, end: int) -> Tensor:
        if self.is_scales:
            parts = [self._quantised(block * fp8.BLOCK, (block + 1) * fp8.BLOCK)[1] for block in range(begin, end)]
            return torch.cat(parts)
        first = begin - begin % fp8.BLOCK
        return self._quantised(first, end)[0][begin - first : end - first]

    def needs(self, begin: int, end: int) -> Iterator[Part]:
        """As of `Joined`."""
        first, last = (begin * fp8.BLOCK, end * fp8.BLOCK) if self.is_scales else (begin - begin % fp8.BLOCK, end)
        yield Part(self.of, first, min(-(-last // fp8.BLOCK) * fp8.BLOCK, self.of.shape[0]))

    def _quantised(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        return fp8.quantise(self.of.rows(begin, min(-(-end // fp8.BLOCK) * fp8.BLOCK, self.of.shape[0])))


def size_of(tensor: Rows) -> int:
    """Bytes."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def blocks(tensor: Rows, size: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """Ranges of rows of about `size` bytes each (one row at least)."""
    count = tensor.shape[0] if tensor.shape else 1
    step = max(1, size * count // max(1, size_of(tensor)))
    step -= step % fp8.BLOCK if step > fp8.BLOCK else 0  # blocks of fp8 are then read once
    for begin in range(0, count, step):
        yield begin, min(begin + step, count)
