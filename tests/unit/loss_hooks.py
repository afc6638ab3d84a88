"""A loss as a user writes one, for runs that find it by `module:function`; no tests here."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.algorithms.losses import LossInputs
from megatron_rl.algorithms.spec import LossSpec


def centred(inputs: LossInputs, spec: LossSpec, *, scale: float = 1.0) -> Tensor:
    """A policy gradient whose weight is the ratio of a token to the geometric mean of its sequence, capped at 2."""
    log_ratio = (inputs.log_probs - inputs.old_log_probs).detach() - inputs.sequence_mean(0)
    return -scale * log_ratio.exp().clamp(max=2.0) * inputs.require_advantages(spec.kind) * inputs.log_probs


def _log_ratios(inputs: LossInputs, spec: LossSpec) -> Tensor:
    return torch.stack([inputs.log_probs - inputs.old_log_probs])


centred.sequence_terms = _log_ratios  # type: ignore[attr-defined]
