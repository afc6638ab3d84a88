"""Statistics of vocabulary slices and how they merge into log-probs and entropy; no communication, no gradient here.

A row's log-prob and entropy follow from four numbers per slice, `(m, s, y, u)`, with x = logits / temperature:

    m = max_j x_j                  s = Σ_j exp(x_j - m)
    y = x_target (0 if not here)   u = Σ_j exp(x_j - m) (x_j - m)

They merge associatively, so that only they travel between tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .vocab_rows import FLOOR, MOST_NEGATIVE, Rows, Scratch, denominator, softmax_

KEPT_ELEMENTS = 1 << 20
"""The forward pass's softmax is kept for backward up to this many elements (4 MB); beyond, fresh memory costs more than
computing it again."""


def vocab_statistics(
    rows: Rows, with_entropy: bool, keep: bool, in_place: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`(m, s, y, u)` of every live row, [4, n] in compute precision; u is 0 without entropy.

    With `keep`, also the softmax within the slice, exp(x - m) / s [n, valid], when it is small enough to be worth its
    memory or, with `in_place`, can take that of the logits; else None.
    """
    n = rows.target.shape[0]
    stats = rows.logits.new_zeros(4, n, dtype=rows.compute_dtype)
    if rows.valid == 0:
        stats[0] = MOST_NEGATIVE
        return stats, None
    target_logit = _target_logit(rows)
    kept = _memory_to_keep(rows, stats, in_place) if keep else None
    scaled, softmaxes, shifted = Scratch(stats), Scratch(stats), Scratch(stats)
    for block in rows.blocks():
        x = rows.scaled(block, scaled)
        p = softmaxes.shaped_as(x) if kept is None else kept[block]
        _block_statistics(x, stats[:, block], p, shifted.shaped_as(x) if with_entropy else None)
    stats[2] = target_logit
    return stats, kept


def _memory_to_keep(rows: Rows, stats: Tensor, in_place: bool) -> Tensor | None:
    if in_place and rows.index is None and rows.logits.dtype == stats.dtype and rows.logits.shape[1] == rows.valid:
        return rows.logits
    n = stats.shape[1]
    return stats.new_empty(n, rows.valid) if n * rows.valid <= KEPT_ELEMENTS else None


def _block_statistics(x: Tensor, out: Tensor, p: Tensor, z: Tensor | None) -> None:
    """m, s, and with scratch z also u, into out [4, b]; the softmax of x [b, valid] into p."""
    m = torch.amax(x, 1).clamp_(min=MOST_NEGATIVE)
    out[0] = m
    if z is not None:
        torch.sub(x, m.unsqueeze(1), out=z).clamp_(min=FLOOR[z.dtype])
    out[1] = s = denominator(softmax_(x, m, p))  # p may be x
    if z is not None:
        torch.mul(z.mul_(p).sum(1), s, out=out[3])


def _target_logit(rows: Rows) -> Tensor:
    """y [n]: the scaled target logit where this slice owns it, else 0."""
    column, owned = rows.owned_target()
    if rows.index is None:
        y = rows.logits.gather(1, column)
    else:
        y = rows.logits[rows.index.unsqueeze(1), column]
    y = y.to(rows.compute_dtype)
    if rows.inverse_temperature is not None:
        y = y * rows.inverse_temperature
    return torch.where(owned, y, 0.0).squeeze(1)


@dataclass(frozen=True)
class Merged:
    """What the merged statistics of all slices say about every live row, [n] each."""

    log_prob: Tensor
    """log-softmax at the target."""
    log_norm: Tensor
    """log Σ_j exp(x_j - m) over the WHOLE vocabulary with THIS slice's maximum m: log p_j = (x_j - m) - log_norm."""
    entropy: Tensor
    """H = -Σ_j p_j log p_j; meaningless when the statistics were made without entropy."""


def combine(stats: Tensor, rank: int) -> Merged:
    """Merge the slices' statistics [P, 4, n] in slice order, the same on every rank; `rank` is this slice."""
    if stats.shape[0] == 1:
        m, s, y, u = stats[0].unbind()
        log_sum = s.log()
        return Merged(log_prob=(y - m) - log_sum, log_norm=log_sum, entropy=log_sum - u / s)
    m, s, y, u = stats.unbind(1)
    maximum = m.amax(0)
    offset = m - maximum
    factor = offset.exp()
    total = (s * factor).sum(0)
    log_sum = total.log()
    return Merged(
        log_prob=(y.sum(0) - maximum) - log_sum,
        log_norm=log_sum - offset[rank],
        entropy=log_sum - ((u + s * offset) * factor).sum(0) / total,
    )
