"""The clipped surrogate of PPO and what GRPO, DAPO and Dr. GRPO make of it; they differ in advantages and weights only.

r = exp(logp - old)
loss = -min(r A, clip(r, 1 - ε_low, 1 + ε_high) A)                       PPO 1707.06347; ε_high > ε_low: DAPO 2503.14476
A < 0 and dual clip c:  loss = min(that, -c A)                           1912.09729
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kl import safe_exp
from ..spec import LossSpec
from .inputs import DUAL, FREE, HIGH, LOW, LossInputs


def token_loss(inputs: LossInputs, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """Loss [T] and flags int8 [T]."""
    ratio = safe_exp(inputs.log_probs - inputs.old_log_probs)
    return clipped_surrogate(ratio, inputs.require_advantages("ppo"), spec)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """Loss [T] and flags int8 [T] of any ratio [T].

    The minimum lets only the upper bound act when A > 0 and only the lower one (with the dual bound above it) when
    A < 0. Written that way, r -> A · (bounded r) has one branch per token, and no tie between two equal arguments of a
    minimum splits its gradient.
    """
    low, high = 1.0 - spec.eps_low, 1.0 + spec.eps_high
    positive, negative = advantages > 0, advantages < 0
    bounded = torch.where(positive, ratio.clamp(max=high), ratio.clamp(min=low, max=spec.dual_clip))
    flags = torch.full_like(ratio, FREE, dtype=torch.int8)
    flags = flags.masked_fill(positive & (ratio > high), HIGH).masked_fill(negative & (ratio < low), LOW)
    if spec.dual_clip is not None:
        flags = flags.masked_fill(negative & (ratio > spec.dual_clip), DUAL)
    return -bounded * advantages, flags
