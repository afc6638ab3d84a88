"""The rows of one rank's logits slice, walked in blocks; what is computed on a block is in the modules beside this one.

Blocks share scratch memory that stays in the cache: several simple passes over such a block cost less than one fused
operator over everything that allocates its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = {torch.float32: -64.0, torch.float64: -600.0}
"""x - max is raised to this. Beside the largest term, exp(-64) = 2e-28 is nothing in float32 (-600: in float64), while
-inf * 0 would be NaN, and exp of arguments that underflow takes a hundred times as long on a CPU."""

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

    def columns(self, block: slice) -> Tensor:
        """True-vocabulary columns of a block's rows, [b, valid]; a view when all rows are live."""
        rows = self.logits[block] if self.index is None else self.logits.index_select(0, self.index[block])
        return rows[:, : self.valid]

    def shifted(self, block: slice, x: Tensor, maximum: Tensor, out: Tensor) -> Tensor:
        """`max(x / temperature - maximum [b, 1], FLOOR)` in `out`, in compute precision whatever the logits' dtype."""
        if self.inverse_temperature is None:
            torch.sub(x, maximum, out=out)
        else:
            torch.mul(x, self.inverse_temperature[block], out=out).sub_(maximum)
        return out.clamp_(min=FLOOR[out.dtype])

    def owned_target(self) -> tuple[Tensor, Tensor]:
        """`(column [n, 1] within the slice, owned [n, 1] bool)` of the targets."""
        column = self.target.clamp(0, self.valid - 1)
        return column.unsqueeze(1), (column == self.target).unsqueeze(1)


class Scratch:
    """Memory that all blocks of a pass share."""

    def __init__(self, like: Tensor) -> None:
        self._memory = like.new_empty(0)

    def shaped_as(self, x: Tensor) -> Tensor:
        """An uninitialised tensor of x's shape. The first block is the largest, so it allocates once."""
        if self._memory.numel() < x.numel():
            self._memory = self._memory.new_empty(x.numel())
        return self._memory[: x.numel()].view(x.shape)


def compute_dtype(logits: Tensor) -> torch.dtype:
    """float32 whatever the logits' precision, but float64 for float64 (gradient checks)."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
