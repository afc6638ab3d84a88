"""Triton kernel for the gradient of log-probs and entropy by a slice of the logits; the formula stands in
`kernels.vocab_gradient`, statistics are in `statistics`.

`out` may be the logits themselves: each element is read before it is written, by the same thread. It may also be a
narrower view over the front of the same rows (OVERLAPS), so that an element is written over OTHER elements. A block's
stores end where its own loads end at the latest, so a barrier between the two, which holds back every warp until all
have loaded, makes that safe; rows never meet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..vocab_rows import Rows
from .launch import LN_2, LOG2_E, MOST_NEGATIVE, columns_block, emulates_rounding, exp2, or_any, rounded, warps


@triton.jit
def _write_zeros(to, width, BLOCK: tl.constexpr):
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        tl.store(to + columns, tl.zeros((BLOCK,), to.dtype.element_ty), mask=columns < width)


@triton.jit
def _derivative(x, is_target, m, scale, norm, g, h, average, HAS_ENTROPY_GRAD: tl.constexpr, OVERLAPS: tl.constexpr):
    """g (onehot - p) - h p (log p + H), with p log p = 0 where p = 0; scale, norm and H in units of log2, h of ln."""
    if OVERLAPS:  # all of x is loaded before any of it is written over
        tl.debug_barrier()
    log_p = (x.to(tl.float32) - m) * scale - norm
    d = g
    if HAS_ENTROPY_GRAD:
        d += h * (tl.maximum(log_p, MOST_NEGATIVE) + average)
    return tl.where(is_target, g, 0.0) - exp2(log_p) * d


@triton.jit
def logits_gradient_kernel(
    logits,
    out,
    position,
    target,
    inverse_temperature,
    maximum,
    log_norm,
    entropy,
    grad,
    entropy_grad,
    row_stride,
    out_stride,
    width,
    valid,
    HAS_POSITION: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_GRAD: tl.constexpr,
    HAS_ENTROPY_GRAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
    EMULATE_ROUNDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of T a program: read once, written once; rows without a gradient are written with 0 and not read."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.load(position + row) if HAS_POSITION else row
    g = tl.load(grad + i, mask=i >= 0, other=0.0) if HAS_GRAD else 0.0
    h = tl.load(entropy_grad + i, mask=i >= 0, other=0.0) if HAS_ENTROPY_GRAD else 0.0
    to = out + row * out_stride
    if (g == 0.0) & (h == 0.0):
        _write_zeros(to, width, BLOCK)
        return
    base = logits + row * row_stride
    lanes = tl.arange(0, BLOCK)
    local = tl.load(target + i).to(tl.int32)
    inverse = tl.load(inverse_temperature + i) if HAS_TEMPERATURE else 1.0
    g *= inverse
    h *= inverse * LN_2
    m = tl.load(maximum + i) / inverse
    norm = tl.load(log_norm + i) * LOG2_E
    average = tl.load(entropy + i) * LOG2_E
    scale = inverse * LOG2_E
    whole = valid // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        columns = start + lanes
        x = tl.load(base + columns)
        d = _derivative(x, columns == local, m, scale, norm, g, h, average, HAS_ENTROPY_GRAD, OVERLAPS)
        tl.store(to + columns, rounded(d, EMULATE_ROUNDING).to(out.dtype.element_ty))
    for start in range(whole, width, BLOCK):
        columns = start + lanes
        x = tl.load(base + columns, mask=columns < width, other=0.0)
        x = tl.where(columns < valid, x, float("-inf"))
        d = _derivative(x, columns == local, m, scale, norm, g, h, average, HAS_ENTROPY_GRAD, OVERLAPS)
        tl.store(to + columns, rounded(d, EMULATE_ROUNDING).to(out.dtype.element_ty), mask=columns < width)


def logits_gradient(
    rows: Rows,
    *,
    maximum: Tensor,
    log_norm: Tensor,
    kept: None = None,
    grad: Tensor | None,
    entropy: Tensor,
    entropy_grad: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """`kernels.vocab_gradient.logits_gradient`; no softmax is ever kept, and all T rows of `out` are written."""
    logits = rows.logits
    out = torch.empty_like(logits) if out is None else out
    if logits.shape[0] == 0:
        return out
    whole = columns_block(logits.shape[1])
    block = whole // 2 if out.element_size() > 2 and whole > 16 else whole  # twice as wide results spill otherwise
    logits_gradient_kernel[(logits.shape[0],)](
        logits,
        out,
        or_any(_positions(rows), rows.target),
        rows.target,
        or_any(rows.inverse_temperature, maximum),
        maximum,
        log_norm,
        entropy,
        maximum if grad is None else grad.float().contiguous(),
        maximum if entropy_grad is None else entropy_grad.float().contiguous(),
        logits.stride(0),
        out.stride(0),
        logits.shape[1],
        rows.valid,
        HAS_POSITION=rows.index is not None,
        HAS_TEMPERATURE=rows.inverse_temperature is not None,
        HAS_GRAD=grad is not None,
        HAS_ENTROPY_GRAD=entropy_grad is not None,
        OVERLAPS=out.data_ptr() == logits.data_ptr() and out.element_size() != logits.element_size(),
        EMULATE_ROUNDING=emulates_rounding(out.dtype),
        BLOCK=block,
        num_warps=warps(whole),
    )
    return out


def _positions(rows: Rows) -> Tensor | None:
    """[T] int64: where each row stands among the live ones, -1 for masked rows; None when all are live."""
    if rows.index is None:
        return None
    positions = rows.index.new_full((rows.logits.shape[0],), -1)
    positions[rows.index] = torch.arange(rows.index.shape[0], device=rows.index.device)
    return positions
