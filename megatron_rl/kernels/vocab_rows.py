"""Row-wise arithmetic on one rank's slice of the vocabulary, in plain PyTorch; no communication and no autograd here.

A row's log-prob and entropy follow from four numbers per vocabulary slice, `(m, s, y, u)`:

    m = max_j x_j                  s = Σ_j exp(x_j - m)
    y = x_target (0 if not here)   u = Σ_j exp(x_j - m) (x_j - m)

with `x = logits / temperature`. They merge associatively, so slices of one GPU and slices of tensor-parallel ranks are
the same thing. Rows are walked in blocks whose scratch stays in the cache: with the block's memory reused, several
simple passes cost less than one fused operator that allocates its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_NEGATIVE = -1e30
"""Stands for the maximum of an empty or all -inf slice: finite, so that differences of maxima are never inf - inf."""

UNDERFLOW = {torch.float32: -128.0, torch.float64: -1024.0}
"""Where exp(z) is exactly 0; z is raised to it before z * exp(z), which would be -inf * 0 otherwise."""


@dataclass(frozen=True)
class Rows:
    """The live rows of a logits slice.

    logits [T, W] floating; target [n] int64 columns relative to this slice (may lie outside it); index [n] int64 row
    numbers, or None when all T rows are live; inverse_temperature [n, 1] or None for 1; valid: columns of the true
    vocabulary in this slice, the rest is padding.
    """

    logits: Tensor
    target: Tensor
    index: Tensor | None
    inverse_temperature: Tensor | None
    valid: int

    @property
    def compute_dtype(self) -> torch.dtype:
        """float32, or float64 for float64 logits."""
        return torch.float64 if self.logits.dtype == torch.float64 else torch.float32

    def blocks(self) -> Iterator[slice]:
        """Consecutive ranges of live rows whose scratch is about 1 MB (256 MB on an accelerator: launches cost)."""
        elements = 1 << (18 if self.logits.device.type == "cpu" else 26)
        n, step = self.target.shape[0], max(1, elements // max(1, self.valid))
        return (slice(a, min(n, a + step)) for a in range(0, n, step))

    def columns(self, block: slice) -> Tensor:
        """The true-vocabulary columns of a block's rows, [b, valid]; a view when every row is live."""
        rows = self.logits[block] if self.index is None else self.logits.index_select(0, self.index[block])
        return rows[:, : self.valid]

    def owned_target(self, block: slice) -> tuple[Tensor, Tensor]:
        """`(column [b, 1] inside the slice, owned [b, 1] bool)` of a block's targets."""
        column = self.target[block].unsqueeze(1)
        return column.clamp(0, self.valid - 1), (column >= 0) & (column < self.valid)

    def shifted(self, block: slice, x: Tensor, shift: Tensor, out: Tensor) -> Tensor:
        """`x / temperature - shift [b, 1]` written to `out`, in compute precision whatever the logits' dtype."""
        if self.inverse_temperature is None:
            return torch.sub(x, shift, out=out)
        return torch.mul(x, self.inverse_temperature[block], out=out).sub_(shift)


def vocab_statistics(rows: Rows, with_entropy: bool) -> Tensor:
    """`(m, s, y, u)` of every live row, [n, 4] in compute precision; u is 0 without entropy."""
    stats = rows.logits.new_zeros(rows.target.shape[0], 4, dtype=rows.compute_dtype)
    if rows.valid == 0:
        stats[:, 0] = MOST_NEGATIVE
        return stats
    for block in rows.blocks():
        x, out = rows.columns(block), stats[block]
        m = x.amax(1, keepdim=True).to(stats.dtype)
        column, owned = rows.owned_target(block)
        y = x.gather(1, column).to(stats.dtype)
        if rows.inverse_temperature is not None:
            m, y = m * rows.inverse_temperature[block], y * rows.inverse_temperature[block]
        m.clamp_(min=MOST_NEGATIVE)
        z = rows.shifted(block, x, m, torch.empty(x.shape, dtype=stats.dtype, device=x.device))
        if with_entropy:
            e = z.clamp_(min=UNDERFLOW[stats.dtype]).exp()
            torch.sum(z.mul_(e), 1, out=out[:, 3])
        else:
            e = z.exp_()
        torch.sum(e, 1, out=out[:, 1])
        out[:, 0:1], out[:, 2:3] = m, torch.where(owned, y, 0.0)
    return stats


def combine(stats: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merge the slices' statistics [P, n, 4], in slice order.

    Returns:
        `(log_prob, maximum, log_sum, entropy)`, each [n]: log-softmax at the target, M = max over the vocabulary,
        log S with S = Σ exp(x - M), and H = log S - U / S (meaningless when the statistics were made without entropy).
    """
    m, s, y, u = stats.unbind(-1)
    maximum = m.amax(0)
    offset = m - maximum
    factor = offset.exp()
    total = (s * factor).sum(0)
    log_sum = total.log()
    entropy = log_sum - ((u + s * offset) * factor).sum(0) / total
    return (y.sum(0) - maximum) - log_sum, maximum, log_sum, entropy


def logits_gradient(
    rows: Rows, maximum: Tensor, log_sum: Tensor, grad: Tensor, entropy: Tensor | None, entropy_grad: Tensor | None
) -> Tensor:
    """Gradient [T, W] in the logits' dtype, rounded once; exactly 0 in masked rows and padding columns.

    With p = softmax(x) and onehot the target: d log_prob / dx = onehot - p and d H / dx = -p (log p + H).
    All other arguments are [n]: M and log S of `combine`, the incoming gradients, and H (with `entropy_grad` only).
    """
    out = torch.zeros_like(rows.logits) if rows.index is not None else torch.empty_like(rows.logits)
    out[:, rows.valid :] = 0
    if rows.valid == 0:
        return out
    scale = (-log_sum).exp()  # p = exp(x - M) / S
    constant, slope = -grad, None
    if entropy is not None and entropy_grad is not None:
        constant, slope = constant + entropy_grad * (log_sum - entropy), -entropy_grad * scale
    coefficients = [constant * scale, grad] if slope is None else [constant * scale, grad, slope]
    columns = torch.stack(coefficients, 1)
    if rows.inverse_temperature is not None:
        columns *= rows.inverse_temperature
    for block in rows.blocks():
        _gradient_block(rows, block, out, maximum[block].unsqueeze(1), *columns[block].split(1, 1))
    return out


def _gradient_block(
    rows: Rows,
    block: slice,
    out: Tensor,
    maximum: Tensor,
    constant: Tensor,
    at_target: Tensor,
    slope: Tensor | None = None,
) -> None:
    """out rows = e (constant + slope z) + onehot at_target with z = x - M and e = exp(z); all coefficients [b, 1]."""
    x = rows.columns(block)
    in_place = rows.index is None and out.dtype == rows.compute_dtype
    target = out[block][:, : rows.valid]
    d = target if in_place else torch.empty(x.shape, dtype=rows.compute_dtype, device=x.device)
    rows.shifted(block, x, maximum, d)
    if slope is None:
        d.exp_().mul_(constant)
    else:
        e = d.clamp_(min=UNDERFLOW[d.dtype]).exp()
        d.mul_(slope).add_(constant).mul_(e)
    column, owned = rows.owned_target(block)
    d.scatter_add_(1, column, torch.where(owned, at_target, 0.0))
    if rows.index is not None:
        out[:, : rows.valid].index_copy_(0, rows.index[block], d.to(out.dtype))
    elif not in_place:
        target.copy_(d)
