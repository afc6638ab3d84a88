"""Matrix products around logits, with float32 sums whatever the operands; no softmax and no loss here.

On CUDA the products of bfloat16 operands leave their float32 accumulators unrounded. A CPU has no such product, so
there the operands are widened, the vocabulary in blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .vocab_rows import compute_dtype

WIDENED_ROWS = 4096
"""Rows of a narrow weight that are widened at a time on a CPU."""


def make_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [n, H] times weight [W, H] transposed: [n, W] float32 (float64 for float64), from the accumulators."""
    wide = compute_dtype(hidden)
    if hidden.dtype == wide:
        return hidden @ weight.t()
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=wide)
    logits = hidden.new_empty(hidden.shape[0], weight.shape[0], dtype=wide)
    hidden = hidden.to(wide)
    for block in _blocks(weight):
        torch.mm(hidden, weight[block].to(wide).t(), out=logits[:, block])
    return logits


def gradient_memory(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Where the gradient of float32 logits [n, W] is written: over them.

    On CUDA it is made in the model's own narrow `dtype`, over the front half of each row, so that the products after
    it need no second buffer. On a CPU it stays wide.
    """
    if not logits.is_cuda or dtype == logits.dtype:
        return logits
    return logits.view(dtype)[:, : logits.shape[1]]


def hidden_gradient(d: Tensor, weight: Tensor) -> Tensor:
    """d [n, W] times weight [W, H]: [n, H] in the weight's dtype, summed in float32."""
    if d.dtype == weight.dtype:
        return d @ weight
    total = d.new_zeros(d.shape[0], weight.shape[1])
    for block in _blocks(weight):
        total.addmm_(d[:, block], weight[block].to(d.dtype))
    return total.to(weight.dtype)


def add_weight_gradient(total: Tensor, d: Tensor, hidden: Tensor) -> None:
    """total [W, H] float32 += d [n, W] transposed times hidden [n, H]."""
    if d.is_cuda and d.dtype != total.dtype:
        torch.addmm(total, d.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(d.t(), hidden.to(total.dtype))


def _blocks(weight: Tensor) -> list[slice]:
    return [slice(a, a + WIDENED_ROWS) for a in range(0, weight.shape[0], WIDENED_ROWS)]
