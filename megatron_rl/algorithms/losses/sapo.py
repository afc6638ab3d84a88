"""SAPO: a soft gate around ratio 1 instead of a clip, steeper for negative advantages.

loss = -(4 / τ) σ(τ (r - 1)) A,   r = exp(logp - old)                                 SAPO 2511.20347

At r = 1 its gradient is that of -r A; away from it the gradient fades and never stops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kl import safe_exp
from ..spec import LossSpec
from .inputs import LossInputs

TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05


def token_loss(
    inputs: LossInputs, spec: LossSpec, *, tau_positive: float = TAU_POSITIVE, tau_negative: float = TAU_NEGATIVE
) -> Tensor:
    """Loss [T]; τ is `tau_positive` where A > 0, else `tau_negative`. Nothing is clipped."""
    advantages = inputs.require_advantages("sapo")
    ratio = safe_exp(inputs.log_probs - inputs.old_log_probs)
    tau = torch.where(advantages > 0, ratio.new_tensor(tau_positive), ratio.new_tensor(tau_negative))
    return -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantages
