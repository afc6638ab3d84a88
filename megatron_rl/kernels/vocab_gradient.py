"""Gradient of log-probs and entropy by a slice of the logits, from the merged statistics; it needs no communication.

With p = softmax(x) and the target's onehot, d log_prob / dx = onehot - p and d H / dx = -p (log p + H). In terms of
z = x - m both are one expression per row: exp(z) (constant + slope z) + onehot grad.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .vocab_rows import FLOOR, Rows, Scratch, denominator, softmax_


def logits_gradient(
    rows: Rows,
    *,
    maximum: Tensor,
    log_norm: Tensor,
    kept: Tensor | None,
    grad: Tensor | None,
    entropy: Tensor,
    entropy_grad: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """Gradient [T, W], rounded once; exactly 0 in masked rows, padding columns and rows with zero gradients.

    That holds whatever stands in them. Masked rows are not read, nor are rows with zero gradients once they are many.

    Args:
        rows: the live rows. maximum: [n], m of this slice. log_norm, entropy: [n], of `Merged`.
        kept: [n, valid], the softmax that `vocab_statistics` kept; None: it is recomputed.
        grad, entropy_grad: [n], gradients of the loss by log_prob and by H; None: not in the loss.
        out: [T, W] to be written as a whole, e.g. the logits' own memory: `rows.logits`, or a narrower dtype over the
            front of each of its rows. None: a new tensor in the logits' dtype.
    """
    out = torch.empty_like(rows.logits) if out is None else out
    grad = torch.zeros_like(log_norm) if grad is None else grad.to(log_norm.dtype)
    acts = grad != 0 if entropy_grad is None else (grad != 0) | (entropy_grad != 0)
    acting = acts.nonzero().squeeze(1)
    positions = None
    if acting.shape[0] < acts.shape[0] and (rows.index is not None or 2 * acting.shape[0] <= acts.shape[0]):
        positions = acting  # the others are worth leaving out
        rows, maximum, log_norm, grad, entropy = (
            rows.subset(positions),
            *(values[positions] for values in (maximum, log_norm, grad, entropy)),
        )
        entropy_grad = None if entropy_grad is None else entropy_grad[positions]
    if rows.valid == 0 or acting.shape[0] == 0:
        return out.zero_()
    _write(rows, out, maximum, kept, positions, *_coefficients(rows, log_norm, grad, entropy, entropy_grad))
    if acting.shape[0] < out.shape[0]:
        written = acting if rows.index is None else rows.index
        at_rest = torch.ones(out.shape[0], dtype=torch.bool, device=out.device).index_fill_(0, written, False)
        out.index_fill_(0, at_rest.nonzero().squeeze(1), 0)
    if rows.valid < out.shape[1]:
        out[:, rows.valid :] = 0
    return out


def _write(
    rows: Rows,
    out: Tensor,
    maximum: Tensor,
    kept: Tensor | None,
    positions: Tensor | None,
    at_target: Tensor,
    constant: Tensor,
    slope: Tensor | None,
) -> None:
    """The gradient of `rows` into their rows of out, block by block; whatever else is in out stays."""
    column, owned = rows.owned_target()
    at_target = torch.where(owned, at_target, 0.0)
    scaled, softmaxes, shifted = Scratch(constant), Scratch(constant), Scratch(constant)
    in_place = rows.index is None and out.dtype == rows.compute_dtype and rows.valid == out.shape[1]
    overwritten = kept is not None and kept.data_ptr() == rows.logits.data_ptr()  # then there are no logits any more
    for block in rows.blocks():
        if kept is not None:
            kept_rows = kept[block] if positions is None else kept.index_select(0, positions[block])
        x = kept_rows if overwritten else rows.scaled(block, scaled)
        d = out[block] if in_place else softmaxes.shaped_as(x)
        if overwritten and slope is not None:
            z = torch.log(x, out=shifted.shaped_as(x)).add_(denominator(x).log_().unsqueeze(1))
        elif slope is not None:
            z = torch.sub(x, maximum[block, None], out=shifted.shaped_as(x))
        p = softmax_(x, maximum[block], d) if kept is None else kept_rows
        s = denominator(p).unsqueeze(1)
        if slope is None:
            torch.mul(p, constant[block] * s, out=d)
        else:
            z.clamp_(min=FLOOR[z.dtype]).mul_(slope[block] * s).add_(constant[block] * s)
            torch.mul(z, p, out=d)
        d.scatter_add_(1, column[block], at_target[block])
        if rows.index is not None:
            _narrow(out, rows.valid).index_copy_(0, rows.index[block], d.to(out.dtype))
        elif not in_place:
            _narrow(out, rows.valid)[block] = d


def _narrow(out: Tensor, valid: int) -> Tensor:
    return out if out.shape[1] == valid else out[:, :valid]


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
