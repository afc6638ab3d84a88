"""Sequence-level ratios, clipped like PPO's: GSPO and its per-token form, which are one computation.

s_i = exp( Σ_t m (logp - old) / N_i )                                    GSPO 2507.18071
loss = -min(s_i A, clip(s_i, 1 - ε_low, 1 + ε_high) A), the same for each token of the sequence

The gradient dL/dlogp_t = -weight_t A s_i (0 when clipped) is that of `gspo_token`, s_i,t = sg[s_i] π(t) / sg[π(t)];
with one advantage and one weight per sequence it is also the derivative of s_i itself. Written per token, a rejected
token loses its own part of the gradient and nothing else, and no gradient travels between context-parallel ranks.
"""

from __future__ import annotations

from torch import Tensor

from ..kl import safe_exp
from ..spec import LossSpec
from .inputs import LossInputs
from .ppo import clipped_surrogate


def sequence_terms(inputs: LossInputs, spec: LossSpec) -> Tensor:
    """[1, T]: the log-ratios, to be summed before any rejection."""
    return (inputs.log_probs - inputs.old_log_probs).detach()[None]


def token_loss(inputs: LossInputs, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """Loss [T] and flags int8 [T]. The MEAN log-ratio is clamped to [-20, 20]; beyond it the gradient is 0."""
    advantages = inputs.require_advantages(spec.kind)
    own = inputs.log_probs - inputs.log_probs.detach()  # 0, with gradient 1
    return clipped_surrogate(safe_exp(inputs.sequence_mean(0) + own), advantages, spec)
