"""RMSNorm for Megatron's local layer spec; with Transformer Engine its own norm is used and this file is not."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm over the last dimension, in the form in which Megatron's specs build norms.

    Megatron's own wrapper of it refuses sequence parallelism. What that needs is one attribute: under sequence
    parallelism each tensor-parallel rank sees other tokens, so Megatron sums the gradient of weights marked
    `sequence_parallel` over the tensor-parallel group.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
