"""Triton kernel for the statistics of `hidden @ weight.T` whose logits exist in registers only, for passes without a
gradient (old and reference policy). What the statistics mean stands in `kernels.vocab_statistics`; training does not
come here, since its gradients need the logits again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import INTERPRETED, LN_2, LOG2_E, MOST_NEGATIVE, or_any
from .statistics import accumulate, merge

TILE = (128, 128, 64)
"""Rows, columns and depth of a tile. Wider ones spill: the logits of a tile stay in registers until they are summed."""

PROGRAMS = 1024
"""About how many programs a launch should have: several for each multiprocessor."""


@triton.jit
def _tile_logits(
    hidden,
    weight,
    rows,
    row_ok,
    columns,
    column_ok,
    depth,
    hidden_stride,
    weight_stride,
    UPCAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """hidden[rows] @ weight[columns].T in float32, [ROWS, COLUMNS]."""
    k = tl.arange(0, DEPTH)
    h_at = hidden + rows[:, None] * hidden_stride + k[None, :]
    w_at = weight + columns.to(tl.int64)[:, None] * weight_stride + k[None, :]
    logits = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        inside = (start + k)[None, :] < depth
        h = tl.load(h_at + start, mask=row_ok[:, None] & inside, other=0.0)
        w = tl.load(w_at + start, mask=column_ok[:, None] & inside, other=0.0)
        if UPCAST:  # the interpreter multiplies the raw bits of bfloat16
            h = h.to(tl.float32)
            w = w.to(tl.float32)
        logits = tl.dot(h, tl.trans(w), logits, input_precision="ieee")
    return logits


@triton.jit
def linear_statistics_kernel(
    hidden,
    weight,
    index,
    target,
    inverse_temperature,
    stats,
    hidden_stride,
    weight_stride,
    n,
    depth,
    valid,
    columns_per_split,
    HAS_TEMPERATURE: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    UPCAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """(m, s, y, u) of ROWS live rows over one split of the columns, [splits, 4, n]."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok = i < n
    rows = tl.load(index + i, mask=ok, other=0)
    local = tl.load(target + i, mask=ok, other=-1)
    inverse = tl.full((ROWS,), 1.0, tl.float32)
    if HAS_TEMPERATURE:
        inverse = tl.load(inverse_temperature + i, mask=ok, other=1.0)
    m = tl.full((ROWS,), MOST_NEGATIVE, tl.float32)
    s = tl.zeros((ROWS,), tl.float32)
    y = tl.zeros((ROWS,), tl.float32)
    u = tl.zeros((ROWS,), tl.float32)
    first = tl.program_id(1) * columns_per_split
    last = tl.minimum(first + columns_per_split, valid)
    for start in range(first, last, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < last
        x = _tile_logits(
            hidden, weight, rows, ok, columns, inside, depth, hidden_stride, weight_stride, UPCAST, ROWS, COLUMNS, DEPTH
        )
        y += tl.sum(tl.where((columns[None, :] == local[:, None]) & inside[None, :], x, 0.0), axis=1)
        x = tl.where(inside[None, :], x, float("-inf"))
        m, s, u = accumulate(x, m, s, u, inverse * LOG2_E, WITH_ENTROPY)
    at = stats + tl.program_id(1).to(tl.int64) * 4 * n + i
    tl.store(at, m * inverse, mask=ok)
    tl.store(at + n, s, mask=ok)
    tl.store(at + 2 * n, y * inverse, mask=ok)
    tl.store(at + 3 * n, u * LN_2, mask=ok)


def linear_statistics(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    index: Tensor,
    inverse_temperature: Tensor | None,
    valid: int,
    with_entropy: bool,
) -> Tensor:
    """`kernels.linear_statistics.linear_statistics`: [4, n] float32. The product is accumulated in float32."""
    n = target.shape[0]
    rows, columns, depth = TILE
    blocks = triton.cdiv(n, rows)
    per_split = triton.cdiv(triton.cdiv(valid, _splits(blocks, valid, columns)), columns) * columns
    splits = triton.cdiv(valid, per_split) if valid else 1
    stats = hidden.new_empty(splits, 4, n, dtype=torch.float32)
    if n:
        linear_statistics_kernel[(blocks, splits)](
            hidden,
            weight,
            index,
            target,
            or_any(inverse_temperature, stats),
            stats,
            hidden.stride(0),
            weight.stride(0),
            n,
            hidden.shape[1],
            valid,
            per_split,
            HAS_TEMPERATURE=inverse_temperature is not None,
            WITH_ENTROPY=with_entropy,
            UPCAST=bool(INTERPRETED.value) and hidden.dtype == torch.bfloat16,
            ROWS=rows,
            COLUMNS=columns,
            DEPTH=depth,
            num_warps=8,
            num_stages=3,
        )
    return merge(stats, with_entropy)


def _splits(blocks: int, valid: int, columns: int) -> int:
    """Over how many programs the columns of one block of rows are spread."""
    return max(1, min(triton.cdiv(PROGRAMS, max(1, blocks)), triton.cdiv(valid, columns)))
