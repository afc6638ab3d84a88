"""What every operator refuses at its door, with the value and what to do; nothing is computed here.

Wrong shapes, ids and temperatures are mistakes of a caller. Non-finite numbers are not refused: in the middle of a
pipeline schedule nothing may raise on one rank alone, so they travel on in the results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COLDEST = 1 / torch.finfo(torch.float32).max
"""The least temperature by which logits can be divided in float32."""


def check_rows(name: str, rows: Tensor, target: Tensor, temperature: float | Tensor, factor: int = 1) -> None:
    """`rows` [T / factor, *], `target` [T] and a temperature that is a number or [T].

    Raises:
        ValueError: shapes disagree, or the temperature is a number that is not positive, or too near to 0.
    """
    if rows.dim() != 2 or target.dim() != 1 or rows.shape[0] * factor != target.shape[0]:
        part = "" if factor == 1 else f", one of {factor} equal parts of its rows on each rank"
        raise ValueError(f"{name} {tuple(rows.shape)} and target {tuple(target.shape)}: expected [T, *] and [T]{part}")
    if isinstance(temperature, Tensor):
        if temperature.shape != target.shape:
            raise ValueError(
                f"temperature {tuple(temperature.shape)}: expected a number or one a token, {tuple(target.shape)}"
            )
    elif not temperature > COLDEST:
        raise ValueError(f"temperature={temperature}: {_must_exceed(temperature)}")


def check_starts(starts: Sequence[int], num_rows: int) -> None:
    """First rows of all sequences: 0, then ascending up to `num_rows`, so that every row belongs to one of them.

    Raises:
        ValueError: they are not; a row would be left out of the loss, or belong to two sequences.
    """
    if not starts or starts[0] != 0:
        first = f"begins with {starts[0]}" if starts else "is empty"
        raise ValueError(f"sequence_starts {first}: the first sequence begins at row 0, else rows before it are lost")
    for before, start, after in zip([0, *starts], starts, [*starts[1:], num_rows], strict=False):
        if not before <= start <= after:
            raise ValueError(f"sequence_starts: {before}, {start}, {after} (of {num_rows} rows) must ascend")


def check_ids(target: Tensor, vocab_size: int) -> bool:
    """Whether some token is masked (-1).

    Raises:
        ValueError: an id is neither -1 nor 0 .. vocab_size - 1; names the first one.
    """
    if target.numel() == 0:
        return False
    lowest, highest = (int(bound) for bound in torch.aminmax(target))
    if lowest < -1 or highest >= vocab_size:
        at = int(((target < -1) | (target >= vocab_size)).nonzero()[0])
        raise ValueError(
            f"target[{at}]={int(target[at])} is outside the vocabulary: ids are 0 .. {vocab_size - 1}, or -1 for a "
            "masked token; check that tokenizer and model belong together"
        )
    return lowest == -1


def live_inverse(
    temperature: float | Tensor, index: Tensor | None, target: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """1 / temperature [n, 1] of the live rows `index` (None: all); None when it is 1 and the pass can be saved.

    Raises:
        ValueError: a temperature at a live row is not positive, or too near to 0.
    """
    if not isinstance(temperature, Tensor):
        n = target.shape[0] if index is None else index.shape[0]
        return None if temperature == 1.0 else target.new_full((n, 1), 1.0 / temperature, dtype=dtype)
    live = temperature if index is None else temperature.index_select(0, index)
    if not bool((live > COLDEST).all()):
        coldest = float(live[~(live > COLDEST)][0])
        raise ValueError(f"temperature={coldest} at a live token: {_must_exceed(coldest)}")
    if bool((live == 1).all()):
        return None
    return live.to(dtype).reciprocal().unsqueeze(1)


def _must_exceed(temperature: float) -> str:
    return f"it must be greater than {f'{COLDEST:.1e}, to divide float32 by it' if temperature > 0 else 0}"
