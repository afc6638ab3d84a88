"""Log-probs and full-vocabulary entropy of vocabulary-sharded logits, with their gradient; the row arithmetic is in
`vocab_statistics` and `vocab_gradient`, losses are in `algorithms`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backend import combine, logits_gradient, vocab_statistics
from .checks import check_ids, check_rows, live_inverse
from .shard import Shard
from .vocab_rows import Rows, compute_dtype


def vocab_parallel_logprob(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`log_softmax(logits / temperature)[target]` and entropy over a vocabulary split over tensor-parallel ranks.

    The only communication is one all-gather of four numbers per live token; ranks merge them in the same order, so
    results are equal to the last bit on every rank. Gradients flow into this rank's own columns and need no
    communication. Rows with target -1 are never read: whatever stands in them, results are 0 and the gradient is
    exactly 0. -inf logits of other tokens are legal.

    Args:
        logits: [T, W] float32, bfloat16 or float16 (float64 for gradient checks); rank r holds columns r W .. (r+1) W.
        target: [T] integer ids of the whole vocabulary, the same on every rank; -1 = masked.
        group: the tensor-parallel group; None (or size 1) means that the logits are whole.
        temperature: sampling temperature, one for all or [T], one a token; > 0 on live rows.
        vocab_size: true vocabulary, what the engine normalises over. Columns from it on are padding: they have no
            probability and gradient exactly 0. None: no padding.
        with_entropy: compute the entropy too. Its gradient costs only when the entropy is used in a loss.

    Returns:
        log_probs [T] and entropy [T] (or None), float32 (float64 for float64 logits), in nats.

    Raises:
        ValueError: shapes disagree, an id lies outside the vocabulary, or a temperature is not positive.
    """
    check_rows("logits", logits, target, temperature)
    shard = Shard.of(logits.shape[1], vocab_size, group)
    some_masked = check_ids(target, logits.shape[1] * shard.size if vocab_size is None else vocab_size)
    index = (target >= 0).nonzero().squeeze(1) if some_masked else None
    rows = Rows(
        logits.detach(),
        _select(target, index).long() - shard.start,
        index,
        live_inverse(temperature, index, target, compute_dtype(logits)),
        shard.valid,
    )
    log_probs, entropy = _VocabParallelLogprob.apply(logits, rows, shard, with_entropy)
    return log_probs, entropy


class _VocabParallelLogprob(torch.autograd.Function):
    """Forward keeps the logits themselves and three numbers a row; backward recomputes the probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Rows,
        shard: Shard,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)  # an unused output then costs nothing in backward
        stats, kept = vocab_statistics(rows, with_entropy, keep=ctx.needs_input_grad[0])
        merged = combine(shard.gather(stats)(), shard.rank)
        ctx.save_for_backward(
            logits,
            rows.target,
            rows.index,
            rows.inverse_temperature,
            stats[0],
            kept,
            merged.log_norm,
            merged.entropy,
        )
        ctx.valid = rows.valid
        return _scatter(merged.log_prob, rows), _scatter(merged.entropy, rows) if with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, target, index, inverse_temperature, maximum, kept, log_norm, entropy = ctx.saved_tensors
        rows = Rows(logits, target, index, inverse_temperature, ctx.valid)
        if grad is None and entropy_grad is None:
            return (None,) * 4
        d = logits_gradient(
            rows,
            maximum=maximum,
            log_norm=log_norm,
            kept=kept,
            grad=None if grad is None else _select(grad, index),
            entropy=entropy,
            entropy_grad=None if entropy_grad is None else _select(entropy_grad, index),
        )
        return (d,) + (None,) * 3


def _select(values: Tensor, index: Tensor | None) -> Tensor:
    return values if index is None else values.index_select(0, index)


def _scatter(values: Tensor, rows: Rows) -> Tensor:
    if rows.index is None:
        return values
    return values.new_zeros(rows.logits.shape[0]).index_copy_(0, rows.index, values)
