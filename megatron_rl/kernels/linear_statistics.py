"""Statistics of logits that are never kept: forward passes of the old and the reference policy; no gradient here."""

from __future__ import annotations

from torch import Tensor

from .matmul import make_logits
from .vocab_rows import Rows, compute_dtype
from .vocab_statistics import vocab_statistics

LOGITS_ELEMENTS = 1 << 24
"""Logits that exist at a time (64 MB): enough rows for a fast product, whatever the vocabulary."""


def linear_statistics(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    index: Tensor,
    inverse_temperature: Tensor | None,
    valid: int,
    with_entropy: bool,
) -> Tensor:
    """`(m, s, y, u)` of `hidden @ weight.T`, [4, n] in compute precision; see `vocab_statistics`.

    Args:
        hidden: [T, H]. weight: [W, H], of which `valid` rows belong to the true vocabulary.
        target, inverse_temperature: of the n live rows, as in `Rows`. index: int64 [n], their numbers; other rows of
            hidden are not read.
    """
    n = target.shape[0]
    stats = hidden.new_zeros(4, n, dtype=compute_dtype(hidden))
    step = max(1, LOGITS_ELEMENTS // weight.shape[0])
    for first in range(0, n, step):
        part = slice(first, first + step)
        inverse = None if inverse_temperature is None else inverse_temperature[part]
        logits = make_logits(hidden.index_select(0, index[part]), weight[:valid])
        stats[:, part], _ = vocab_statistics(Rows(logits, target[part], None, inverse, valid), with_entropy, keep=False)
    return stats
