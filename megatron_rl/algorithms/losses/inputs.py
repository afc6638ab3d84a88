"""What every token loss receives and the flags that it returns; no loss is computed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Required, TypedDict

from torch import Tensor

FREE, HIGH, LOW, DUAL, REJECTED, REJECTED_SEQUENCE = range(6)
"""Flags, one a token: no clip acts; the upper, the lower or the dual clip acts; the token itself, or its whole
sequence, was rejected by an off-policy correction."""


@dataclass(frozen=True)
class Sequences:
    """Which token belongs to which sequence, for losses and corrections with one ratio per sequence."""

    index: Tensor
    """int64 [T], the sequence of each token, 0 .. S - 1; any of them at masked positions."""
    lengths: Tensor
    """float64 [S], trainable tokens N_i of the WHOLE sequence before any rejection: all context-parallel ranks, all
    packed pieces."""
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None
    """Adds up float64 [K, S] over context-parallel ranks; None: this rank has whole sequences."""

    def sums(self, terms: Tensor, trainable: Tensor) -> Tensor:
        """Sum of `terms` [K, T] over the trainable tokens of each whole sequence, float64 [K, S]."""
        masked = terms.detach().double().where(trainable, 0.0)
        sums = masked.new_zeros(len(terms), len(self.lengths)).index_add_(1, self.index, masked)
        return sums if self.sum_over_ranks is None else self.sum_over_ranks(sums)


class TokenTensors(TypedDict, total=False):
    """The keywords of `policy_loss`, where they are explained."""

    weights: Required[Tensor]
    old_log_probs: Tensor | None
    advantages: Tensor | None
    behaviour_log_probs: Tensor | None
    reference_log_probs: Tensor | None
    entropy: Tensor | None
    trainable: Tensor | None
    sequences: Sequences | None


@dataclass(frozen=True)
class LossInputs:
    """Per-token tensors [T] in float64, finite numbers (0) at masked positions."""

    log_probs: Tensor
    """Current policy, with gradient."""
    old_log_probs: Tensor
    """Policy before the first update of the batch, detached."""
    advantages: Tensor | None
    """Detached; None for losses that have none."""
    live: Tensor
    """bool; positions with a weight."""
    behaviour_log_probs: Tensor | None = None
    """Policy that sampled the tokens, as the engine reported it, detached; None when it is not known."""
    sequences: Sequences | None = None
    """Only for losses with `sequence_terms`."""
    sequence_sums: Tensor | None = None
    """float64 [K, S], the loss's `sequence_terms` summed over the trainable tokens of each sequence, detached."""

    def require_advantages(self, kind: str) -> Tensor:
        """The advantages, or a ValueError that names the loss."""
        if self.advantages is None:
            raise ValueError(f"loss={kind} needs advantages, one per token")
        return self.advantages

    def sequence_sum(self, term: int) -> Tensor:
        """[T], for every token the sum of its sequence's `term`, a row of what `sequence_terms` returned."""
        if self.sequences is None or self.sequence_sums is None:
            raise ValueError("this loss has no sequence_terms, so there are no sums over sequences")
        return self.sequence_sums[term][self.sequences.index]

    def sequence_mean(self, term: int) -> Tensor:
        """[T], `sequence_sum` divided by the sequence's trainable tokens N_i."""
        total = self.sequence_sum(term)
        assert self.sequences is not None
        return total / self.sequences.lengths.double().clamp(min=1.0)[self.sequences.index]
