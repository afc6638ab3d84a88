"""Off-policy corrections for the gap between sampling engine and trainer: factors and rejections, no losses.

ρ_t = exp(old - behaviour), detached
    tis        clip(ρ, lo, hi)                                       (2, 0)
    icepop     ρ inside [lo, hi], rejected outside                   (0.5, 5)
    mis        1 inside [lo, hi], rejected outside                   (0.5, 5)
    seq_mis    a whole sequence is rejected when its geometric-mean ρ lies outside its bounds

A factor multiplies loss and KL; a rejection sets the weight to 0. The sums of `seq_mis` use the mask before rejection.
Which tokens are too old to be in the loss at all is decided in `staleness`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .kl import safe_exp
from .spec import LossSpec


@dataclass(frozen=True)
class Correction:
    """What the corrections of a spec do to each token, float64 and bool [T], detached."""

    factor: Tensor
    """Multiplies the loss and its KL term."""
    rejected: Tensor
    """By its own ρ."""
    rejected_sequence: Tensor
    """By the ρ of its whole sequence."""


def correct(log_rho: Tensor, spec: LossSpec, mean_log_rho: Tensor | None = None) -> Correction:
    """The corrections of `spec`.

    Args:
        log_rho: [T] old - behaviour, finite; 0 at masked positions.
        spec: which corrections, and their bounds.
        mean_log_rho: [T], the mean of `log_rho` over the trainable tokens of each token's sequence; for seq_mis.
    """
    rho, (low, high) = safe_exp(log_rho), spec.token_bounds
    nothing = torch.zeros_like(rho, dtype=torch.bool)
    outside = (rho < low) | (rho > high) if spec.correction in ("icepop", "mis") else nothing
    factor = torch.ones_like(rho)
    if spec.correction == "tis":
        factor = rho.clamp(low, high)
    elif spec.correction == "icepop":
        factor = torch.where(outside, 0.0, rho)
    if spec.sequence_bounds is None:
        return Correction(factor, outside, nothing)
    if mean_log_rho is None:
        raise ValueError("seq_mis compares whole sequences: pass `sequences` to policy_loss")
    whole, (low, high) = safe_exp(mean_log_rho), spec.sequence_bounds
    return Correction(factor, outside, (whole < low) | (whole > high))
