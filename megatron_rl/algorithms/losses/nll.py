"""The negative log-likelihood of given targets, the loss of supervised fine-tuning; no advantages, no ratios."""

from __future__ import annotations

from torch import Tensor

from ..spec import LossSpec
from .inputs import LossInputs


def token_loss(inputs: LossInputs, spec: LossSpec) -> Tensor:
    """Loss -logp [T]."""
    return -inputs.log_probs
