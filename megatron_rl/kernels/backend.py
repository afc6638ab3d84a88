"""Which implementation of the row kernels runs: the only place that looks at a tensor's device; no arithmetic here.

CUDA tensors go to `triton`, all others to the PyTorch functions beside this module. Both keep one contract, which
stands at the PyTorch functions. float64 (gradient checks) is PyTorch's on every device. With TRITON_INTERPRET=1, which
only tests set, CPU tensors go to the same Triton kernels, run by Triton's interpreter.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, Unpack

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

P = ParamSpec("P")
R = TypeVar("R")


def vocab_statistics(
    rows: Rows, with_entropy: bool, keep: bool, in_place: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`vocab_statistics.vocab_statistics`."""
    if _on_triton(rows.logits):
        return _triton().vocab_statistics(rows, with_entropy), None
    return _statistics.vocab_statistics(rows, with_entropy, keep, in_place)


def _by_device(plain: Callable[P, R]) -> Callable[P, R]:
    """`plain`, or the function of its name in `triton`, whichever is for the first argument."""

    @functools.wraps(plain)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        function = plain
        if _on_triton(first.logits if isinstance(first, Rows) else first):
            function = getattr(_triton(), plain.__name__)
        return function(*args, **kwargs)

    return run


combine = _by_device(_statistics.combine)
logits_gradient = _by_device(_gradient.logits_gradient)
linear_statistics = _by_device(_linear)


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
