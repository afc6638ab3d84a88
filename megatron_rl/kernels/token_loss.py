"""A loss of detached per-token numbers with its gradient, by autograd over `algorithms.losses`; knows no logits.

It serves every loss of the registry, a user's own among them. A closed form in one kernel (see `backend`) must agree.
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from megatron_rl.algorithms import losses
from megatron_rl.algorithms.spec import LossSpec


class PolicyLossOutput(NamedTuple):
    """What a loss says of its tokens; everything detached but, from `kernels.policy_loss`, the loss itself."""

    loss: Tensor
    """float64 scalar, a SUM: all normalisation is in the weights."""
    flags: Tensor
    """int8 [T], of `algorithms.losses`: which clip or rejection acts."""
    d_log_probs: Tensor
    """[T], gradient of the loss by each log-prob, in its dtype."""
    d_entropy: Tensor | None
    """[T], gradient by each entropy; None when the loss has no entropy term."""


def token_loss(log_probs: Tensor, spec: LossSpec, **tensors: Unpack[losses.TokenTensors]) -> PolicyLossOutput:
    """`algorithms.losses.policy_loss` and its gradient at once.

    Args:
        log_probs: [T].
        tensors: the others of `algorithms.losses.policy_loss`, by its names.
    """
    entropy = tensors.get("entropy") if spec.entropy_coef else None
    leaves = [x.detach().requires_grad_() for x in (log_probs, entropy) if x is not None]
    tensors["entropy"] = leaves[1] if len(leaves) > 1 else None
    with torch.enable_grad():
        loss, flags = losses.policy_loss(leaves[0], spec, **tensors)
    gradients = torch.autograd.grad(loss, leaves)
    return PolicyLossOutput(loss.detach(), flags, gradients[0], gradients[1] if len(gradients) > 1 else None)
