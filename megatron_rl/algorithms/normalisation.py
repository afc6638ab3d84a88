"""The weight of each sequence's tokens in the loss, from counts over the whole batch of one optimizer step; the loss
itself only sums weighted terms.

Counting once and globally, before the first micro-batch, is what makes the loss independent of every split into
micro-batches, ranks and packings. (numpy, float64)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

NORMALISATIONS = ("token_mean", "seq_mean_token_mean", "constant")


@dataclass(frozen=True)
class BatchCounts:
    """Global denominators of one optimizer step: over all data-parallel ranks, no context-parallel token twice."""

    tokens: int
    """Σ_i N_i, trainable tokens."""
    sequences: int
    """Sequences with at least one trainable token."""

    @classmethod
    def of(cls, n_tokens: ArrayLike) -> BatchCounts:
        """Counts of a batch from its trainable tokens per sequence [B]."""
        n = np.asarray(n_tokens)
        return cls(tokens=int(n.sum()), sequences=int((n > 0).sum()))


def token_weights(normalisation: str, n_tokens: ArrayLike, constant: float = 1.0) -> NDArray[np.float64]:
    """Weight of each trainable token of a sequence, one number per sequence.

        token_mean              1 / Σ_i N_i              (2503.14476)
        seq_mean_token_mean     1 / (N_i B)              (2402.03300)
        constant                1 / (B L)                (2503.20783)

    with B the sequences that have a trainable token. A token's weight in the loss is this times its mask.

    Args:
        normalisation: one of NORMALISATIONS.
        n_tokens: [B] trainable tokens N_i of each sequence of the whole batch.
        constant: L > 0, a configured length such as the longest response, never a padded width; `constant` only.

    Returns:
        [B] float64; 0 for a fully masked sequence, so all 0 for a fully masked batch.
    """
    n = np.asarray(n_tokens, dtype=np.float64)
    counts = BatchCounts.of(n)
    if normalisation == "token_mean":
        denominator = np.full_like(n, counts.tokens)
    elif normalisation == "seq_mean_token_mean":
        denominator = n * counts.sequences
    else:
        denominator = np.full_like(n, counts.sequences * constant)
    return np.divide(1.0, denominator, out=np.zeros_like(n), where=n > 0)
