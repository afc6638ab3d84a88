"""From hidden states and output weight to a policy loss or to log-probs, with the logits of one chunk at a time.

`linear_policy_loss` makes gradients while a chunk's logits exist (6 T H V floating-point operations instead of 8), in
the logits' own memory; how is in `linear_pass`. Which loss it is, an `objective` says. Both operators take

- hidden: [T, H] float32 or bfloat16 (float64 for gradient checks), the same on every rank of the group; with
  `sequence_parallel` [T / ranks, H], this rank's rows. Masked rows are never read and cost nothing;
- weight: [W, H] in the dtype of hidden, this rank's rows of the output layer;
- target: [T] integer ids of the whole vocabulary, the same on every rank; -1 = masked;
- group: the tensor-parallel group, over which the vocabulary is split; None = the weight is whole;
- temperature: of the sampling, one for all or [T], one a token; > 0 on live rows;
- vocab_size: true vocabulary; rows of the weight from it on are padding, without influence and without gradient;
- chunk_tokens: live tokens whose logits exist at a time (twice as many over several ranks);
- with_entropy: compute the entropy of the whole vocabulary, too.

Logits are float32 sums of the product. Tensor-parallel communication is one all-gather of four numbers per live token,
started before and awaited after the next chunk's product, and the hidden states' own. Log-probs and entropies are equal
to the last bit on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import backend
from .checks import check_ids, check_rows, check_starts, live_inverse
from .chunks import cut
from .linear_pass import LinearPass, LiveRows, Objective
from .shard import Shard
from .te_pass import TePass
from .vocab_rows import compute_dtype


class LinearLossOutput(NamedTuple):
    """The loss, differentiable in hidden and weight, and what it saw of every token, detached; 0 at masked tokens."""

    loss: Tensor
    """float64 scalar, the SUM of the objective over all chunks."""
    log_probs: Tensor
    """[T] float32 (float64 for float64 operands), in nats."""
    entropy: Tensor | None
    """[T], of the whole vocabulary."""
    flags: Tensor
    """int8 [T], of the objective."""


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    objective: Objective,
    group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    chunk_tokens: int = 4096,
    sequence_starts: Sequence[int] | None = None,
    equal_cuts: bool = False,
    with_entropy: bool = False,
    sequence_parallel: bool = False,
    main_grad: Tensor | None = None,
    logprob_backend: Literal["auto", "te"] = "auto",
) -> LinearLossOutput:
    """`objective` of the log-probs of `softmax(hidden weight^T / temperature)`, without logits of all tokens.

    The hidden gradient is summed over ranks at the end (with sequence parallelism hidden is gathered first, and the sum
    is scattered). Rows whose log-prob and entropy have no gradient cost nothing once they are many.

    Args:
        hidden, weight, target, group, temperature, vocab_size, chunk_tokens, with_entropy, sequence_parallel: see the
            module's docstring.
        objective: called once a chunk, with the numbers of its live rows (int64 [n], ascending), their log-probs [n]
            and entropies [n] (None without `with_entropy`); see `PolicyLossOutput`.
        sequence_starts: first row of every sequence, ascending from 0, if the objective needs whole sequences. Chunks
            are then cut between sequences only; one that is longer than a chunk is computed twice (8 T H V).
        equal_cuts: call the objective equally often on all ranks that hold equally long parts of the same sequences
            (context parallelism), whatever is masked.
        main_grad: [W, H] float32; the weight's gradient is ADDED here, in forward, instead of being returned in
            backward. The loss must then enter backward with gradient 1: anything else gives NaN.
        logprob_backend: `te` uses Transformer Engine's parallel cross entropy (CUDA only, no entropy).

    Raises:
        ValueError: shapes disagree, an id lies outside the vocabulary, a temperature is not positive or too near to 0,
            or sequence_starts leave rows out.
    """
    rows = _live_rows(hidden, weight, target, group, temperature, vocab_size, sequence_parallel)
    if main_grad is not None:
        _check_buffer(main_grad, weight)
    if sequence_starts is not None:
        check_starts(sequence_starts, target.shape[0])
    chunks = cut(rows.index, target.shape[0], chunk_tokens, sequence_starts, equal_cuts)
    kind = TePass if logprob_backend == "te" else LinearPass
    found = _LinearPolicyLoss.apply(hidden, weight, rows, chunks, objective, with_entropy, main_grad, kind)
    return LinearLossOutput(*found)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    chunk_tokens: int = 4096,
    with_entropy: bool = False,
    sequence_parallel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [T] and entropy [T] (or None) as `linear_policy_loss` has them, forward only; for arguments see above.

    On CUDA no logits reach memory; elsewhere a few rows at a time do. The statistics of a chunk travel while the next
    chunk's are computed.
    """
    rows = _live_rows(hidden, weight, target, group, temperature, vocab_size, sequence_parallel)
    with torch.no_grad():
        whole = rows.all_hidden(hidden.detach())
        chunks = cut(rows.index, target.shape[0], chunk_tokens, None, False)
        gathered = [rows.shard.gather(rows.statistics(whole, slice(*piece), with_entropy)) for [piece] in chunks]
        log_probs = whole.new_zeros(target.shape[0], dtype=compute_dtype(whole))
        entropy = torch.zeros_like(log_probs) if with_entropy else None
        for [piece], wait in zip(chunks, gathered, strict=True):
            merged = backend.combine(wait(), rows.shard.rank)
            index = rows.index[slice(*piece)]
            log_probs[index] = merged.log_prob
            if entropy is not None:
                entropy[index] = merged.entropy
    return log_probs, entropy


class _LinearPolicyLoss(Function):
    """Forward has all gradients ready; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        rows: LiveRows,
        chunks: list[list[tuple[int, int]]],
        objective: Objective,
        with_entropy: bool,
        main_grad: Tensor | None,
        kind: type[LinearPass],
    ) -> tuple[Tensor | None, ...]:
        run = kind(rows, hidden, objective, with_entropy, ctx.needs_input_grad[:2], main_grad)
        for pieces in chunks:
            if len(pieces) == 1:
                run.add(pieces[0])
            else:
                run.add_long(pieces)
        run.finish()
        ctx.gradients = run.gradients, main_grad is not None, weight.dtype
        ctx.mark_non_differentiable(*(x for x in (run.log_probs, run.entropy, run.flags) if x is not None))
        return run.loss, run.log_probs, run.entropy, run.flags

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients, already_added, weight_dtype = ctx.gradients
        d_hidden, d_weight = gradients()
        if already_added:
            grad, d_weight = torch.where(grad == 1, grad, torch.nan), None
        d_hidden = None if d_hidden is None else d_hidden * grad
        d_weight = None if d_weight is None else (d_weight * grad).to(weight_dtype)
        return (d_hidden, d_weight) + (None,) * 6


def _check_buffer(main_grad: Tensor, weight: Tensor) -> None:
    wanted = compute_dtype(weight)
    if main_grad.shape != weight.shape or main_grad.dtype != wanted:
        raise ValueError(
            f"main_grad {main_grad.dtype} {tuple(main_grad.shape)}: expected {wanted} {tuple(weight.shape)}, the shape "
            "of weight"
        )


def _live_rows(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None,
    temperature: float | Tensor,
    vocab_size: int | None,
    sequence_parallel: bool,
) -> LiveRows:
    shard = Shard.of(weight.shape[0], vocab_size, group)
    check_rows("hidden", hidden, target, temperature, factor=shard.size if sequence_parallel else 1)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1] or weight.dtype != hidden.dtype:
        raise ValueError(
            f"weight {weight.dtype} {tuple(weight.shape)} and hidden {hidden.dtype} {tuple(hidden.shape)}: expected "
            "[W, H] and [T, H] of one dtype"
        )
    check_ids(target, weight.shape[0] * shard.size if vocab_size is None else vocab_size)
    index = (target >= 0).nonzero().squeeze(1)
    return LiveRows(
        weight.detach(),
        shard,
        index,
        target.index_select(0, index).long() - shard.start,
        live_inverse(temperature, index, target, compute_dtype(hidden)),
        target.shape[0],
        sequence_parallel and shard.size > 1,
    )
