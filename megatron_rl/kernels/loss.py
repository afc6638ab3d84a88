"""The policy loss as one operator: loss, gradient and flags over [T] numbers; its formulas are elsewhere."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_rl.algorithms.losses import TokenTensors
from megatron_rl.algorithms.spec import LossSpec

from . import backend
from .token_loss import PolicyLossOutput


def policy_loss(log_probs: Tensor, spec: LossSpec, **tensors: Unpack[TokenTensors]) -> PolicyLossOutput:
    """Weighted sum of per-token losses, differentiable in `log_probs` and `entropy`.

    Its gradient is known when the call returns: on CUDA one kernel writes it in closed form for built-in losses;
    elsewhere, and for losses of one's own, autograd runs over `algorithms.losses.policy_loss`.

    Args:
        log_probs: [T] float32 (or float64) of the current policy.
        spec: which loss and its constants.
        tensors: `weights` and whatever else the spec needs, as for `algorithms.losses.policy_loss`.

    Raises:
        ValueError: a tensor that the spec needs is missing or has another shape.

    >>> import torch
    >>> ones = torch.ones(2)
    >>> out = policy_loss(torch.tensor([-1.0, -2.0]), LossSpec(), weights=ones / 2, advantages=ones)
    >>> float(out.loss), out.d_log_probs.tolist(), out.flags.tolist()
    (-1.0, [-0.5, -0.5], [0, 0])
    """
    return PolicyLossOutput(*_PolicyLoss.apply(log_probs, tensors.get("entropy"), spec, tensors))


class _PolicyLoss(Function):
    @staticmethod
    def forward(
        ctx: Any, log_probs: Tensor, entropy: Tensor | None, spec: LossSpec, tensors: TokenTensors
    ) -> tuple[Tensor | None, ...]:
        found = backend.token_loss(log_probs, spec, **tensors)
        ctx.save_for_backward(found.d_log_probs, found.d_entropy)
        ctx.mark_non_differentiable(*(x for x in found[1:] if x is not None))
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        d_log_probs, d_entropy = ctx.saved_tensors
        return d_log_probs * grad, None if d_entropy is None else d_entropy * grad, None, None
