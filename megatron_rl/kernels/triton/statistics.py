"""Triton kernels for the statistics of vocabulary slices and their merging; what they mean stands in
`kernels.vocab_statistics`, gradients are in `gradient`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..vocab_rows import Rows
from ..vocab_statistics import Merged
from . import launch
from .launch import LN_2, LOG2_E, MOST_NEGATIVE, columns_block, exp2, or_any, warps


@triton.jit
def accumulate(x, m, s, u, scale, WITH_ENTROPY: tl.constexpr):
    """(m, s, u) [A] of the rows of a tile, with the raw logits x [A, B] added; scale [A] = log2 e / temperature.

    m is the maximum of raw logits, u is in units of log2: subtract first, then scale, and round to base e once."""
    larger = tl.maximum(m, tl.max(x, axis=1))
    z = (x - larger[:, None]) * scale[:, None]
    moved = (m - larger) * scale
    e = exp2(z)
    shrink = exp2(moved)
    if WITH_ENTROPY:  # e^z (z - a) = e^z z - a e^z; -inf is raised to a number, since 0 * -inf is NaN
        u = (u + s * moved) * shrink + tl.sum(e * tl.maximum(z, MOST_NEGATIVE), axis=1)
    return larger, s * shrink + tl.sum(e, axis=1), u


@triton.jit
def vocab_statistics_kernel(
    logits,
    index,
    target,
    inverse_temperature,
    stats,
    row_stride,
    n,
    width,
    valid,
    HAS_INDEX: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One live row a program: (m, s, y, u), one pass over the row.

    VECTOR neighbouring columns, one load of one thread, share a running maximum: threads then need nothing of each
    other until the row is read, and rescaling costs one exponential for VECTOR columns. Whole blocks go without masks.
    The last one is masked by the allocated width, which Megatron makes a multiple of 16, so that its loads stay 128
    bits wide too; padding columns, from `valid` on, are taken out in registers."""
    i = tl.program_id(0)
    row = i.to(tl.int64)
    if HAS_INDEX:
        row = tl.load(index + i)
    inverse = 1.0
    if HAS_TEMPERATURE:
        inverse = tl.load(inverse_temperature + i)
    base = logits + row * row_stride
    LANES: tl.constexpr = BLOCK // VECTOR
    scale = tl.full((LANES,), LOG2_E, tl.float32) * inverse
    m = tl.full((LANES,), MOST_NEGATIVE, tl.float32)
    s = tl.zeros((LANES,), tl.float32)
    u = tl.zeros((LANES,), tl.float32)
    tile = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    whole = valid // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        x = tl.load(base + start + tile).to(tl.float32)
        m, s, u = accumulate(x, m, s, u, scale, WITH_ENTROPY)
    if whole < valid:
        columns = whole + tile
        x = tl.load(base + columns, mask=columns < width, other=0.0).to(tl.float32)
        m, s, u = accumulate(tl.where(columns < valid, x, float("-inf")), m, s, u, scale, WITH_ENTROPY)
    top = tl.max(m, axis=0)
    moved = (m - top) * scale
    factor = exp2(moved)
    local = tl.load(target + i)
    owned = (local >= 0) & (local < valid)
    y = tl.load(base + tl.where(owned, local, 0), mask=owned, other=0.0).to(tl.float32)
    tl.store(stats + i, top * inverse)
    tl.store(stats + n + i, tl.sum(s * factor, axis=0))
    tl.store(stats + 2 * n + i, y * inverse)
    if WITH_ENTROPY:
        tl.store(stats + 3 * n + i, tl.sum((u + s * moved) * factor, axis=0) * LN_2)
    else:
        tl.store(stats + 3 * n + i, 0.0)


@triton.jit
def _merge(stats, i, ok, n, parts):
    """(m, s, y, u) of all parts together, of rows i [ROWS]; parts in order, so equal on every rank."""
    m = tl.full(i.shape, MOST_NEGATIVE, tl.float32)
    for part in range(parts):
        m = tl.maximum(m, tl.load(stats + part * 4 * n + i, mask=ok, other=0.0))
    s = tl.zeros(i.shape, tl.float32)
    y = tl.zeros(i.shape, tl.float32)
    u = tl.zeros(i.shape, tl.float32)
    for part in range(parts):
        at = stats + part * 4 * n + i
        offset = tl.load(at, mask=ok, other=0.0) - m
        factor = tl.exp(offset)
        mine = tl.load(at + n, mask=ok, other=1.0)
        s += mine * factor
        y += tl.load(at + 2 * n, mask=ok, other=0.0)
        u += (tl.load(at + 3 * n, mask=ok, other=0.0) + mine * offset) * factor
    return m, s, y, u


@triton.jit
def merge_kernel(stats, merged, n, parts, WITH_ENTROPY: tl.constexpr, ROWS: tl.constexpr):
    """Parts of one slice [parts, 4, n] -> the slice [4, n]."""
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    ok = i < n
    m, s, y, u = _merge(stats, i, ok, n, parts)
    tl.store(merged + i, m, mask=ok)
    tl.store(merged + n + i, s, mask=ok)
    tl.store(merged + 2 * n + i, y, mask=ok)
    tl.store(merged + 3 * n + i, u if WITH_ENTROPY else tl.zeros(i.shape, tl.float32), mask=ok)


@triton.jit
def combine_kernel(stats, log_prob, log_norm, entropy, n, parts, rank, ROWS: tl.constexpr):
    """Slices of all ranks [parts, 4, n] -> log-prob, entropy, and the log normaliser beside the maximum of `rank`."""
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    ok = i < n
    m, s, y, u = _merge(stats, i, ok, n, parts)
    log_sum = tl.log(s)
    mine = tl.load(stats + rank * 4 * n + i, mask=ok, other=0.0)
    tl.store(log_prob + i, (y - m) - log_sum, mask=ok)
    tl.store(log_norm + i, log_sum - (mine - m), mask=ok)
    tl.store(entropy + i, log_sum - u / s, mask=ok)


def vocab_statistics(rows: Rows, with_entropy: bool) -> Tensor:
    """`kernels.vocab_statistics.vocab_statistics`: [4, n] float32. Exponentials are never kept."""
    n = rows.target.shape[0]
    stats = rows.logits.new_empty(4, n, dtype=torch.float32)
    if n == 0:
        return stats
    block = columns_block(rows.valid)
    vocab_statistics_kernel[(n,)](
        rows.logits,
        or_any(rows.index, rows.target),
        rows.target,
        or_any(rows.inverse_temperature, stats),
        stats,
        rows.logits.stride(0),
        n,
        rows.logits.shape[1],
        rows.valid,
        HAS_INDEX=rows.index is not None,
        HAS_TEMPERATURE=rows.inverse_temperature is not None,
        WITH_ENTROPY=with_entropy,
        VECTOR=16 // rows.logits.element_size(),
        BLOCK=block,
        num_warps=warps(block),
    )
    return stats


def merge(stats: Tensor, with_entropy: bool) -> Tensor:
    """Statistics of parts of one slice [parts, 4, n] -> those of the slice [4, n], float32; u is 0 without entropy."""
    parts, _, n = stats.shape
    if parts == 1 or n == 0:
        return stats[0]
    merged = stats.new_empty(4, n)
    merge_kernel[(triton.cdiv(n, launch.ROWS),)](
        stats, merged, n, parts, WITH_ENTROPY=with_entropy, ROWS=launch.ROWS, num_warps=4
    )
    return merged


def combine(stats: Tensor, rank: int) -> Merged:
    """`kernels.vocab_statistics.combine`: [parts, 4, n] float32 -> `Merged`."""
    parts, _, n = stats.shape
    stats = stats.contiguous()
    log_prob, log_norm, entropy = stats.new_empty(3, n)
    if n:
        combine_kernel[(triton.cdiv(n, launch.ROWS),)](
            stats, log_prob, log_norm, entropy, n, parts, rank, ROWS=launch.ROWS, num_warps=4
        )
    return Merged(log_prob, log_norm, entropy)
