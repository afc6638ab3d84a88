"""Log-probs and full-vocabulary entropy of vocabulary-sharded logits, with their gradient; the row arithmetic is in
`vocab_statistics` and `vocab_gradient`, losses are in `algorithms`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .vocab_gradient import logits_gradient
from .vocab_rows import Rows, compute_dtype
from .vocab_statistics import combine, vocab_statistics


def vocab_parallel_logprob(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    entropy_requires_grad: bool = True,
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
        entropy_requires_grad: False returns an entropy outside the graph, for metrics.

    Returns:
        log_probs [T] and entropy [T] (or None), float32 (float64 for float64 logits), in nats.

    Raises:
        ValueError: shapes disagree, an id lies outside the vocabulary, or a temperature is not positive.
    """
    width = logits.shape[-1] * _size(group)
    vocab_size = width if vocab_size is None else vocab_size
    _check_shapes(logits, target, temperature)
    if not 0 < vocab_size <= width:
        raise ValueError(
            f"vocab_size={vocab_size} does not fit logits of {width} columns over all ranks; use 1 .. {width}"
        )
    _check_ids(target, vocab_size)
    log_probs, entropy = _VocabParallelLogprob.apply(
        logits, target.long(), group, temperature, vocab_size, with_entropy, entropy_requires_grad
    )
    return log_probs, entropy


class _VocabParallelLogprob(torch.autograd.Function):
    """Forward keeps the logits themselves and three numbers a row; backward recomputes the probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        group: dist.ProcessGroup | None,
        temperature: float | Tensor,
        vocab_size: int,
        with_entropy: bool,
        entropy_requires_grad: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)  # an unused output then costs nothing in backward
        rows = _live_rows(logits, target, group, temperature, vocab_size)
        stats, kept = vocab_statistics(rows, with_entropy, keep=ctx.needs_input_grad[0])
        merged = combine(_gather(stats, group), _rank(group))
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
        log_probs = _scatter(merged.log_prob, rows)
        if not with_entropy:
            return log_probs, None
        entropy = _scatter(merged.entropy, rows)
        if not entropy_requires_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, target, index, inverse_temperature, maximum, kept, log_norm, entropy = ctx.saved_tensors
        rows = Rows(logits, target, index, inverse_temperature, ctx.valid)
        if grad is None and entropy_grad is None:
            return (None,) * 7
        d = logits_gradient(
            rows,
            maximum=maximum,
            log_norm=log_norm,
            kept=kept,
            grad=None if grad is None else _select(grad, index),
            entropy=entropy,
            entropy_grad=None if entropy_grad is None else _select(entropy_grad, index),
        )
        return (d,) + (None,) * 6


def _live_rows(
    logits: Tensor, target: Tensor, group: dist.ProcessGroup | None, temperature: float | Tensor, vocab_size: int
) -> Rows:
    width = logits.shape[1]
    start = _rank(group) * width
    all_live = target.numel() == 0 or int(target.min()) >= 0
    index = None if all_live else (target >= 0).nonzero().squeeze(1)
    local = _select(target, index) - start
    return Rows(
        logits.detach(),
        local,
        index,
        _inverse_temperature(temperature, index, local, compute_dtype(logits)),
        min(width, max(0, vocab_size - start)),
    )


def _inverse_temperature(
    temperature: float | Tensor, index: Tensor | None, like: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """1 / temperature [n, 1] of the live rows; None when it is the number 1 and the pass can be saved."""
    if not isinstance(temperature, Tensor):
        if temperature == 1.0:
            return None
        return torch.full((like.shape[0], 1), 1.0 / temperature, dtype=dtype, device=like.device)
    live = _select(temperature, index)
    if not bool((live > 0).all()):
        raise ValueError(f"temperature={float(live[~(live > 0)][0])} at a live token: it must be greater than 0")
    if bool((live == 1).all()):
        return None
    return live.to(dtype).reciprocal().unsqueeze(1)


def _select(values: Tensor, index: Tensor | None) -> Tensor:
    return values if index is None else values.index_select(0, index)


def _scatter(values: Tensor, rows: Rows) -> Tensor:
    if rows.index is None:
        return values
    return values.new_zeros(rows.logits.shape[0]).index_copy_(0, rows.index, values)


def _gather(stats: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[4, n] of this rank -> [ranks, 4, n]. Every rank of the group sees the same targets, hence the same n."""
    world = _size(group)
    if world == 1 or stats.numel() == 0:
        return stats.expand(world, *stats.shape)
    out = stats.new_empty(world * stats.shape[0], stats.shape[1])
    dist.all_gather_into_tensor(out, stats, group=group)
    return out.view(world, *stats.shape)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def _check_shapes(logits: Tensor, target: Tensor, temperature: float | Tensor) -> None:
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} and target {tuple(target.shape)}: expected [T, W] and [T]")
    if isinstance(temperature, Tensor):
        if temperature.shape != target.shape:
            raise ValueError(
                f"temperature {tuple(temperature.shape)}: expected a number or one a token, {tuple(target.shape)}"
            )
    elif not temperature > 0:
        raise ValueError(f"temperature={temperature}: it must be greater than 0")


def _check_ids(target: Tensor, vocab_size: int) -> None:
    if target.numel() == 0:
        return
    lowest, highest = torch.aminmax(target)
    if int(lowest) < -1 or int(highest) >= vocab_size:
        at = int(((target < -1) | (target >= vocab_size)).nonzero()[0])
        raise ValueError(
            f"target[{at}]={int(target[at])} is outside the vocabulary: ids are 0 .. {vocab_size - 1}, or -1 for a "
            "masked token; check that tokenizer and model belong together"
        )
