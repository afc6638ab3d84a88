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

from .vocab_rows import Rows, Scratch

MOST_NEGATIVE = -1e20
"""Stands for the maximum of an empty or all -inf slice: finite, so that differences of maxima are never inf - inf."""

KEPT_ELEMENTS = 1 << 22
"""Exponentials of the forward pass are kept for backward up to this many (16 MB), and recomputed beyond."""


def vocab_statistics(rows: Rows, with_entropy: bool, keep: bool) -> tuple[Tensor, Tensor | None]:
    """`(m, s, y, u)` of every live row, [4, n] in compute precision; u is 0 without entropy.

    With `keep`, also exp(x - m) [n, valid] when it is small enough to be worth its memory, else None.
    """
    n = rows.target.shape[0]
    stats = rows.logits.new_zeros(4, n, dtype=rows.compute_dtype)
    if rows.valid == 0:
        stats[0] = MOST_NEGATIVE
        return stats, None
    kept = stats.new_empty(n, rows.valid) if keep and n * rows.valid <= KEPT_ELEMENTS else None
    exponentials, shifted = Scratch(stats), Scratch(stats)
    for block in rows.blocks():
        x = rows.columns(block)
        e = exponentials.shaped_as(x) if kept is None else kept[block]
        _block_statistics(rows, block, x, stats[:, block], e, shifted.shaped_as(x) if with_entropy else None)
    stats[2] = _target_logit(rows)
    return stats, kept


def _block_statistics(rows: Rows, block: slice, x: Tensor, out: Tensor, e: Tensor, z: Tensor | None) -> None:
    """m, s, and with scratch z also u, into out [4, b]; exp(x - m) into e [b, valid]."""
    m = x.amax(1, keepdim=True).to(out.dtype)
    if rows.inverse_temperature is not None:
        m = m * rows.inverse_temperature[block]
    out[0] = m.clamp_(min=MOST_NEGATIVE).squeeze(1)
    if z is None:
        rows.shifted(block, x, m, e).exp_()
    else:
        torch.exp(rows.shifted(block, x, m, z), out=e)
        torch.sum(z.mul_(e), 1, out=out[3])
    torch.sum(e, 1, out=out[1])


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
