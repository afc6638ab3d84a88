"""OPMD: policy gradient on the log-prob of the whole sequence with a squared pull towards the old policy, no ratios.

With logp(y) = Σ_t m logp_t:   loss = -A logp(y) + (τ / 2) (logp(y) - old(y))²         (mirror descent, e.g. 2505.17826)

A is to be r - mean of the group (`advantage: dr_grpo`). Each token carries its own share, so that tokens with equal
weights add up to the line above.
"""

from __future__ import annotations

from torch import Tensor

from ..spec import LossSpec
from .inputs import LossInputs

TAU = 1.0


def sequence_terms(inputs: LossInputs, spec: LossSpec) -> Tensor:
    """[1, T]: the log-ratios, to be summed before any rejection."""
    return (inputs.log_probs - inputs.old_log_probs).detach()[None]


def token_loss(inputs: LossInputs, spec: LossSpec, *, tau: float = TAU) -> Tensor:
    """Loss [T] with dL/dlogp_t = -A + τ (logp(y) - old(y))."""
    distance = inputs.sequence_sum(0)
    constant = inputs.log_probs.detach()
    pull = distance * (0.5 * (constant - inputs.old_log_probs) + (inputs.log_probs - constant))
    return -inputs.require_advantages("opmd") * inputs.log_probs + tau * pull
