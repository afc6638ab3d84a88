"""RMSNorm for Megatron's local layer spec; with Transformer Engine its own norm is used and this file is not."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class RMSNorm(torch.nn.Module):
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension (1910.07467), as Megatron's specs build norms.

    Megatron's own wrapper of torch.nn.RMSNorm refuses sequence parallelism. What that needs is one attribute: each
    tensor-parallel rank then sees other tokens, so Megatron sums the gradient of weights marked `sequence_parallel`
    over the tensor-parallel group.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Norm `[..., hidden_size]`; the result has the dtype of `x`."""
        if x.device.type == "cpu" and x.dtype is torch.float32:
            return _RMSNorm.apply(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """The same in few passes over the tokens: torch has a fused kernel for CUDA only, and walking back through each of
    its operations on CPU costs a tenth of a small model's step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = scale.square_().mul_(1.0 / x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        product = (grad * normed).view(-1, x.size(-1))
        mean = product.mv(weight).mul_(1.0 / x.size(-1)).view_as(scale)
        grad_x = (grad * weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x, product.sum(0), None
