"""How far two checkpoints are from each other, tensor by tensor, across formats and layouts; nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch

from megatron_rl.weights.convert.one_file import Advance
from megatron_rl.weights.convert.opened import Opened
from megatron_rl.weights.convert.tensors import Rows, blocks, cast_rows, size_of
from megatron_rl.weights.convert.torch_dist import TorchDistReader


@dataclass(frozen=True)
class Difference:
    """Between two tensors of one name.

    Attributes:
        max_abs: largest difference of two numbers; infinite where the shapes differ or one side alone is not finite.
        max_rel: `max_abs` over the largest number of the first tensor.
        note: what else differs: shape, dtype.
    """

    name: str
    max_abs: float
    max_rel: float
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """All differences, largest first, and the names that only one side has."""

    differences: list[Difference]
    only_first: list[str]
    only_second: list[str]

    @property
    def is_equal(self) -> bool:
        """Whether both hold the same numbers under the same names."""
        return not (self.only_first or self.only_second or any(found.max_abs for found in self.differences))


def total_size(first: Opened, second: Opened) -> int:
    """Bytes that `compare` reads."""
    return sum(size_of(tensor) for side in _sides(first, second) for tensor in side.values())


def compare(first: Opened, second: Opened, advance: Advance) -> Comparison:
    """Read both, block by block. Of one format: every tensor, optimizer state included; else the model's weights.

    Blocks of fp8 are compared as the numbers they mean, rounded to the other side's dtype.

    Raises:
        WeightsError: a file is damaged; or the formats differ, and a checkpoint does not fit its config.json.
    """
    left, right = _sides(first, second)
    found = [_difference(left[name], right[name], advance) for name in left if name in right]
    found.sort(key=lambda difference: (-difference.max_rel, -difference.max_abs, difference.name))
    return Comparison(found, sorted(left.keys() - right.keys()), sorted(right.keys() - left.keys()))


def _sides(first: Opened, second: Opened) -> tuple[Mapping[str, Rows], Mapping[str, Rows]]:
    if isinstance(first.reader, TorchDistReader) and isinstance(second.reader, TorchDistReader):
        return first.reader.every_plane(), second.reader.every_plane()
    # Numbers in blocks of fp8 as a conversion to the other side's dtype would write them; of both sides, exactly.
    wide = torch.float32
    left, right = (side.plain(wide) if first.is_hf == second.is_hf else side.as_hf(wide) for side in (first, second))
    return _rounded(left, first.in_blocks, right), _rounded(right, second.in_blocks, left)


def _rounded(own: Mapping[str, Rows], in_blocks: Set[str], other: Mapping[str, Rows]) -> dict[str, Rows]:
    return {
        name: cast_rows(tensor, other[name].dtype) if name in in_blocks and name in other else tensor
        for name, tensor in own.items()
    }


def _difference(left: Rows, right: Rows, advance: Advance) -> Difference:
    note = "" if left.dtype is right.dtype else f"{_short(left.dtype)} / {_short(right.dtype)}"
    if left.shape != right.shape:
        advance(size_of(left) + size_of(right))
        return Difference(left.name, float("inf"), float("inf"), f"{list(left.shape)} / {list(right.shape)}")
    largest = scale = 0.0
    for begin, end in blocks(left):
        a, b = left.rows(begin, end), right.rows(begin, end)
        advance(a.nbytes + b.nbytes)
        if a.dtype is b.dtype and torch.equal(a, b):
            continue
        wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
        a, b = a.to(wide), b.to(wide)
        same = (a == b) | (a.isnan() & b.isnan())
        gap = (a - b).abs().masked_fill_(same, 0).nan_to_num_(nan=float("inf"))
        largest, scale = max(largest, gap.max().item()), max(scale, a.abs().nan_to_num_(nan=0.0).max().item())
    return Difference(left.name, largest, largest / scale if scale else (float("inf") if largest else 0.0), note)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
