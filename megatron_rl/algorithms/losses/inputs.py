"""What every token loss receives and the flags that it returns; no loss is computed here."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

FREE, HIGH, LOW, DUAL = 0, 1, 2, 3
"""Clip flags: no clip acts; the upper clip, the lower clip, or the dual clip took the token's gradient."""


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

    def require_advantages(self, kind: str) -> Tensor:
        """The advantages, or a ValueError that names the loss."""
        if self.advantages is None:
            raise ValueError(f"loss={kind} needs advantages, one per token")
        return self.advantages
