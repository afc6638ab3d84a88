"""The rows of one rank's logits slice, walked in blocks; what is computed on a block is in the modules beside this one.

Blocks share scratch memory that stays in the cache: several simple passes over such a block cost less than one fused
operator over everything that allocates its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FLOOR = {torch.float32: -64.0, torch.float64: -600.0}
"""x - max is raised to this. Beside the largest term, exp(-64) = 2e-28 is nothing in float32 (-600: in float64), while
-inf * 0 would be NaN."""

MOST_NEGATIVE = -1e20
"""Stands for the maximum of an empty or all -inf slice: finite, so that differences of maxima are never inf - inf."""

BLOCK_ELEMENTS = {"cpu": 1 << 17}
"""Elements of a block by device type: half a MB of float32 for the second-level cache of a CPU core."""

ACCELERATOR_BLOCK_ELEMENTS = 1 << 26
"""Where memory is fast and launches cost, blocks only bound the scratch (256 MB)."""


@dataclass(frozen=True)
class Rows:
    """The live rows of a logits slice; n of T rows, `valid` of W columns."""

    logits: Tensor
    """[T, W] floating."""
    target: Tensor
    """[n] int64, column of the target relative to this slice; outside 0 .. valid - 1 when another slice owns it."""
    index: Tensor | None
    """[n] int64 row numbers, or None when all T rows are live."""
    inverse_temperature: Tensor | None
    """[n, 1] in compute precision, or None for 1."""
    valid: int
    """Columns of the true vocabulary in this slice; the rest is padding."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """float32, or float64 for float64 logits."""
        return compute_dtype(self.logits)

    def blocks(self) -> Iterator[slice]:
        """Consecutive ranges of live rows."""
        elements = BLOCK_ELEMENTS.get(self.logits.device.type, ACCELERATOR_BLOCK_ELEMENTS)
        n, step = self.target.shape[0], max(1, elements // max(1, self.valid))
        return (slice(a, min(n, a + step)) for a in range(0, n, step))

    def scaled(self, block: slice, scratch: Scratch) -> Tensor:
        """x / temperature of a block's true columns, [b, valid] contiguous in compute precision.

        The logits themselves when they are that already, else a copy in `scratch`.
        """
        if self.index is None:
            x = self.logits[block, : self.valid]
        else:
            x = self.logits.index_select(0, self.index[block])[:, : self.valid]
        if self.inverse_temperature is not None:
            return torch.mul(x, self.inverse_temperature[block], out=scratch.shaped_as(x))
        if x.dtype == self.compute_dtype and x.is_contiguous():
            return x
        return scratch.shaped_as(x).copy_(x)

    def owned_target(self) -> tuple[Tensor, Tensor]:
        """`(column [n, 1] within the slice, owned [n, 1] bool)` of the targets."""
        column = self.target.clamp(0, self.valid - 1)
        return column.unsqueeze(1), (column == self.target).unsqueeze(1)

    def subset(self, positions: Tensor) -> Rows:
        """The live rows at `positions` int64 [k] alone."""
        inverse = self.inverse_temperature
        return replace(
            self,
            target=self.target[positions],
            index=positions if self.index is None else self.index[positions],
            inverse_temperature=None if inverse is None else inverse[positions],
        )


class Scratch:
    """Memory that all blocks of a pass share."""

    def __init__(self, like: Tensor) -> None:
        self._memory = like.new_empty(0)

    def shaped_as(self, x: Tensor) -> Tensor:
        """An uninitialised tensor of x's shape. The first block is the largest, so it allocates once."""
        if self._memory.numel() < x.numel():
            self._memory = self._memory.new_empty(x.numel())
        return self._memory[: x.numel()].view(x.shape)


def softmax_(x: Tensor, maximum: Tensor, out: Tensor) -> Tensor:
    """Softmax of x [b, valid] within the slice, in `out` (which may be x); 0 in rows that are -inf everywhere.

    PyTorch's fused softmax costs half of what its separate exp alone does on a CPU.

    Args:
        maximum: [b], the rows' maximum, MOST_NEGATIVE in rows that are -inf everywhere.
    """
    torch.softmax(x, 1, out=out)
    empty = maximum <= MOST_NEGATIVE
    if bool(empty.any()):
        out.masked_fill_(empty.unsqueeze(1), 0.0)
    return out


def denominator(p: Tensor) -> Tensor:
    """s [b] = Σ exp(x - max x) of softmax rows p [b, valid]: the largest is exp(0) / s. Finite for rows of 0."""
    return p.amax(1).reciprocal_().clamp_(max=1e12)


def compute_dtype(logits: Tensor) -> torch.dtype:
    """float32 whatever the logits' precision, but float64 for float64 (gradient checks)."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
