"""The negative log-likelihood of given targets, the loss of supervised fine-tuning; no advantages, no ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import LossSpec
from .inputs import FREE, LossInputs


def token_loss(inputs: LossInputs, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """Loss -logp [T] and flags int8 [T], all free."""
    return -inputs.log_probs, torch.full_like(inputs.log_probs, FREE, dtype=torch.int8)
