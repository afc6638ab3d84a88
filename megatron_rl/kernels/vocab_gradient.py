"""Gradient of log-probs and entropy by a slice of the logits, from the merged statistics; it needs no communication.

With p = softmax(x) and the target's onehot, d log_prob / dx = onehot - p and d H / dx = -p (log p + H). In terms of
z = x - m both are one expression per row: exp(z) (constant + slope z) + onehot grad.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .vocab_rows import Rows, Scratch


def logits_gradient(
    rows: Rows,
    *,
    maximum: Tensor,
    log_norm: Tensor,
    kept: Tensor | None,
    grad: Tensor | None,
    entropy: Tensor,
    entropy_grad: Tensor | None,
) -> Tensor:
    """Gradient [T, W] in the logits' dtype, rounded once; exactly 0 in masked rows and padding columns.

    Args:
        rows: the live rows. maximum: [n], m of this slice. log_norm, entropy: [n], of `Merged`.
        kept: [n, valid], exp(z) of the forward pass; None: it is recomputed.
        grad, entropy_grad: [n], gradients of the loss by log_prob and by H; None: not in the loss.
    """
    out = torch.empty_like(rows.logits) if rows.index is None else torch.zeros_like(rows.logits)
    out[:, rows.valid :] = 0
    if rows.valid == 0:
        return out
    grad = torch.zeros_like(log_norm) if grad is None else grad.to(log_norm.dtype)
    at_target, constant, slope = _coefficients(rows, log_norm, grad, entropy, entropy_grad)
    column, owned = rows.owned_target()
    at_target = torch.where(owned, at_target, 0.0)
    maximum, scratch, more = maximum.unsqueeze(1), Scratch(log_norm), Scratch(log_norm)
    in_place = rows.index is None and out.dtype == rows.compute_dtype
    for block in rows.blocks():
        target = out[block, : rows.valid]
        d = target if in_place else scratch.shaped_as(target)
        if slope is None:
            e = _shifted(rows, block, maximum, d).exp_() if kept is None else kept[block]
            torch.mul(e, constant[block], out=d)
        else:
            z = _shifted(rows, block, maximum, d)
            e = torch.exp(z, out=more.shaped_as(z)) if kept is None else kept[block]
            z.mul_(slope[block]).add_(constant[block]).mul_(e)
        d.scatter_add_(1, column[block], at_target[block])
        if rows.index is not None:
            out[:, : rows.valid].index_copy_(0, rows.index[block], d.to(out.dtype))
        elif not in_place:
            target.copy_(d)
    return out


def _shifted(rows: Rows, block: slice, maximum: Tensor, out: Tensor) -> Tensor:
    return rows.shifted(block, rows.columns(block), maximum[block], out)


def _coefficients(
    rows: Rows, log_norm: Tensor, grad: Tensor, entropy: Tensor, entropy_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`(at_target, constant, slope)`, [n, 1] each, with exp(-log_norm) and 1 / temperature folded in."""
    scale = (-log_norm).exp()  # p = exp(z) scale
    constant, slope = -grad * scale, None
    if entropy_grad is not None:
        constant = (entropy_grad * (log_norm - entropy) - grad) * scale
        slope = (-entropy_grad * scale).unsqueeze(1)
    at_target, constant = grad.unsqueeze(1), constant.unsqueeze(1)
    if rows.inverse_temperature is None:
        return at_target, constant, slope
    inverse = rows.inverse_temperature
    return at_target * inverse, constant * inverse, None if slope is None else slope * inverse
