"""Which implementation of the row kernels runs: the only place that looks at a tensor's device; no arithmetic here.

CUDA tensors go to `triton`, all others to the PyTorch functions beside this module. Both keep one contract, which
stands at the PyTorch functions. float64 (gradient checks) is PyTorch's on every device. With TRITON_INTERPRET=1, which
only tests set, CPU tensors go to the same Triton kernels, run by Triton's interpreter.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Unpack

import torch
from torch import Tensor

from megatron_rl.algorithms.losses import TokenTensors
from megatron_rl.algorithms.spec import LossSpec

from . import vocab_gradient as _gradient
from . import vocab_statistics as _statistics
from .linear_statistics import linear_statistics as _linear
from .token_loss import PolicyLossOutput
from .token_loss import token_loss as _token_loss
from .vocab_rows import Rows
from .vocab_statistics import Merged


def vocab_statistics(
    rows: Rows, with_entropy: bool, keep: bool, in_place: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`vocab_statistics.vocab_statistics`."""
    if _on_triton(rows.logits):
        return _triton().vocab_statistics(rows, with_entropy), None
    return _statistics.vocab_statistics(rows, with_entropy, keep, in_place)


def combine(stats: Tensor, rank: int) -> Merged:
    """`vocab_statistics.combine`."""
    if _on_triton(stats):
        return _triton().combine(stats, rank)
    return _statistics.combine(stats, rank)


def logits_gradient(
    rows: Rows,
    *,
    maximum: Tensor,
    log_norm: Tensor,
    kept: Tensor | None,
    grad: Tensor | None,
    entropy: Tensor,
    entropy_grad: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """`vocab_gradient.logits_gradient`."""
    if _on_triton(rows.logits):
        return _triton().logits_gradient(
            rows,
            maximum=maximum,
            log_norm=log_norm,
            grad=grad,
            entropy=entropy,
            entropy_grad=entropy_grad,
            out=out,
        )
    return _gradient.logits_gradient(
        rows,
        maximum=maximum,
        log_norm=log_norm,
        kept=kept,
        grad=grad,
        entropy=entropy,
        entropy_grad=entropy_grad,
        out=out,
    )


def linear_statistics(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    index: Tensor | None,
    inverse_temperature: Tensor | None,
    valid: int,
    with_entropy: bool,
) -> Tensor:
    """`linear_statistics.linear_statistics`."""
    if _on_triton(hidden):
        return _triton().linear_statistics(hidden, weight, target, index, inverse_temperature, valid, with_entropy)
    return _linear(hidden, weight, target, index, inverse_temperature, valid, with_entropy)


def token_loss(log_probs: Tensor, spec: LossSpec, **tensors: Unpack[TokenTensors]) -> PolicyLossOutput:
    """`token_loss.token_loss`; on a GPU in closed form where there is one."""
    if _on_triton(log_probs) and spec.kind in _triton().KINDS:
        return _triton().token_loss(log_probs, spec, **tensors)
    return _token_loss(log_probs, spec, **tensors)


def _on_triton(x: Tensor) -> bool:
    return x.dtype != torch.float64 and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


def _triton() -> ModuleType:
    """Imported at the first use: Triton comes with the CUDA builds of torch and is not needed anywhere else."""
    from . import triton

    return triton
