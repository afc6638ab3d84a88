"""CISPO: the policy gradient with a clipped, detached importance weight, so that no token loses its gradient.

loss = -sg[ clip(r, 1 - ε_low, 1 + ε_high) ] A logp,   r = exp(logp - old)            CISPO 2506.13585
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kl import safe_exp
from ..spec import LossSpec
from .inputs import FREE, HIGH, LOW, LossInputs


def token_loss(inputs: LossInputs, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """Loss [T] and flags int8 [T]. Both bounds act whatever the sign of the advantage; ε_low >= 1 has no effect."""
    low, high = 1.0 - spec.eps_low, 1.0 + spec.eps_high
    ratio = safe_exp(inputs.log_probs - inputs.old_log_probs).detach()
    flags = torch.full_like(ratio, FREE, dtype=torch.int8)
    flags = flags.masked_fill(ratio > high, HIGH).masked_fill(ratio < low, LOW)
    return -ratio.clamp(low, high) * inputs.require_advantages("cispo") * inputs.log_probs, flags
