"""GMPO: the geometric mean of the ratios of a sequence, each clipped on the side where it would do harm.

c_t = min(log r_t, log(1 + ε_high)) for A > 0, max(log r_t, log(1 - ε_low)) for A < 0,   log r = logp - old
loss = -A exp( Σ_t m c_t / N_i ), the same for each token of the sequence             GMPO 2507.20673

A clipped token has no gradient; the others have dL/dlogp_t = -weight_t A exp(mean).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kl import safe_exp
from ..spec import LossSpec
from .inputs import FREE, HIGH, LOW, LossInputs


def sequence_terms(inputs: LossInputs, spec: LossSpec) -> Tensor:
    """[1, T]: the clipped log-ratios, to be summed before any rejection."""
    return _clipped(inputs, spec).detach()[None]


def token_loss(inputs: LossInputs, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """Loss [T] and flags int8 [T]. The MEAN is clamped to [-20, 20]; beyond it the gradient is 0."""
    advantages = inputs.require_advantages("gmpo")
    clipped = _clipped(inputs, spec)
    ratio = safe_exp(inputs.sequence_mean(0) + (clipped - clipped.detach()))
    log_ratio, (low, high) = inputs.log_probs - inputs.old_log_probs, _log_bounds(spec)
    flags = torch.full_like(ratio, FREE, dtype=torch.int8)
    flags = flags.masked_fill((advantages > 0) & (log_ratio > high), HIGH)
    return -ratio * advantages, flags.masked_fill((advantages < 0) & (log_ratio < low), LOW)


def _clipped(inputs: LossInputs, spec: LossSpec) -> Tensor:
    log_ratio, (low, high) = inputs.log_probs - inputs.old_log_probs, _log_bounds(spec)
    return torch.where(inputs.require_advantages("gmpo") > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=low))


def _log_bounds(spec: LossSpec) -> tuple[float, float]:
    low = 1.0 - spec.eps_low
    return (math.log(low) if low > 0 else -math.inf), math.log1p(spec.eps_high)
