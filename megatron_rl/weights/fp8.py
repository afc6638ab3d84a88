"""Matrices in blocks of 128 x 128 fp8 numbers, each with a scale, as DeepSeek-V3's checkpoints have them; no file I/O.

A matrix `NAME` [M, N] is float8_e4m3fn, and beside it lies `NAME_scale_inv`, float32 [M / 128, N / 128] (rounded up):
a number is its fp8 value times the scale of its block (2412.19437, section 3.3). Despite its name the scale is what is
multiplied by.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.weights import WeightsError

if TYPE_CHECKING:
    from megatron_rl.weights.layouts import Source

BLOCK = 128
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SUFFIX = "_scale_inv"
"""Behind the name of the matrix: the name of its scales."""
_TINY = torch.finfo(torch.float32).tiny
CHUNK_BYTES = 64 * 2**20
"""Of fp32 numbers at a time while a matrix is quantised."""


def quantization_config() -> dict[str, Any]:
    """What config.json says of a model in this format; engines scale activations by themselves."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }


def names_in_blocks(names: Set[str]) -> set[str]:
    """Those of a checkpoint's tensors that are matrices in blocks: their scales lie beside them."""
    return {name for name in names if name + SUFFIX in names}


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the scales of a matrix."""
    return -(-rows // BLOCK), -(-columns // BLOCK)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in blocks: float8_e4m3fn [M, N] and float32 scales.

    The largest number of a block becomes 448, the largest of fp8. With its scale s, a number w comes back as w within
    max(|w| / 16, s / 1024), but for roundings of fp32: fp8 has three bits behind the leading one, and below 2 ** -6 a
    fixed step of 2 ** -9. A block of zeros has scale 1.

    Args:
        weight: floating point [M, N].
    """
    values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = torch.empty(scale_shape(*weight.shape), dtype=torch.float32, device=weight.device)
    for first, last in _row_blocks(weight):
        blocks = _blocks(weight[first * BLOCK : last * BLOCK].float())
        largest = blocks.abs().amax(dim=(1, 3))
        # Not below the smallest normal number: a scale of 0 would make 0 / 0 of the block's zeros.
        scale = torch.where(largest == 0, 1.0, (largest / LARGEST).clamp(min=_TINY))
        scaled = (blocks / scale[:, None, :, None]).clamp(-LARGEST, LARGEST)
        rows = values[first * BLOCK : last * BLOCK]
        rows.copy_(scaled.flatten(2).flatten(0, 1)[: len(rows), : weight.shape[1]])
        scales[first:last] = scale
    return values, scales


def dequantise(values: Tensor, scales: Tensor, row: int = 0, column: int = 0) -> Tensor:
    """float32 [m, n]: fp8 numbers times their scales, rounded once.

    Args:
        values: float8_e4m3fn [m, n], all of a matrix or a part of it.
        scales: of the blocks that the part touches.
        row, column: of the part's first number, counted from the beginning of its block.
    """
    by_row = scales.float().repeat_interleave(BLOCK, dim=0)[row : row + values.shape[0]]
    by_number = by_row.repeat_interleave(BLOCK, dim=1)[:, column : column + values.shape[1]]
    return values.float().mul_(by_number)


@dataclass(frozen=True)
class Dequantised:
    """A matrix in blocks as if it were stored in float32; reads the rows or columns that are asked for.

    Attributes:
        values, scales: its two tensors, a `layouts.Source` each.
    """

    values: Source
    scales: Source
    dtype = torch.float32

    def __post_init__(self) -> None:
        if len(self.shape) != 2:
            raise WeightsError(
                f"{self.name}: has scales ({SUFFIX}) but the shape {list(self.shape)}; only matrices are stored in "
                "blocks of fp8: get the file again, from its source"
            )
        if self.values.dtype != FP8:
            raise WeightsError(
                f"{self.name}: has scales ({SUFFIX}) but dtype {str(self.values.dtype).removeprefix('torch.')} instead "
                "of float8_e4m3fn; if its numbers are complete without them, remove the scales from the files"
            )
        if self.scales.shape != scale_shape(*self.shape):
            raise WeightsError(
                f"{self.name}: scales of shape {list(self.scales.shape)} do not belong to fp8 numbers of shape "
                f"{list(self.shape)} in blocks of {BLOCK} x {BLOCK}; other block sizes cannot be read"
            )

    @property
    def name(self) -> str:
        return self.values.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole matrix."""
        return self.values.shape

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows `begin` to `end`, float32. Raises WeightsError for scales that are not positive."""
        first = begin // BLOCK
        scales = self._positive(self.scales.rows(first, max(first, -(-end // BLOCK))))
        return dequantise(self.values.rows(begin, end), scales, row=begin - first * BLOCK)

    def columns(self, begin: int, end: int) -> Tensor:
        """Columns `begin` to `end`, float32. Raises as `rows`."""
        first = begin // BLOCK
        scales = self._positive(self.scales.columns(first, max(first, -(-end // BLOCK))))
        return dequantise(self.values.columns(begin, end), scales, column=begin - first * BLOCK)

    def _positive(self, scales: Tensor) -> Tensor:
        """NaN passes: whoever reads refuses numbers that are not finite, or was told to go on."""
        if bool((scales <= 0).any()):
            raise WeightsError(
                f"{self.name}{SUFFIX}: holds a scale of {scales.min():g}, where every scale is above 0; the file was "
                "damaged or written wrongly, get it again from its source"
            )
        return scales


def _row_blocks(weight: Tensor) -> Iterator[tuple[int, int]]:
    """First and last + 1 block of rows, few enough for `CHUNK_BYTES`."""
    count, step = scale_shape(*weight.shape)[0], max(1, CHUNK_BYTES // (4 * BLOCK * max(1, weight.shape[1])))
    for first in range(0, count, step):
        yield first, min(first + step, count)


def _blocks(part: Tensor) -> Tensor:
    """[block row, row, block column, column], filled up with zeros."""
    rows, columns = part.shape
    padded = F.pad(part, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
