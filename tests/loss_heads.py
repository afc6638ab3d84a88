"""One batch of a loss through the fused linear operator as training calls it, split in any way, and by the formulas
over full float64 logits; holds no tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.losses import Sequences
from megatron_rl.algorithms.normalisation import BatchCounts
from megatron_rl.algorithms.token_statistics import finalise_metrics, merge_statistics
from megatron_rl.policy.forward import LossHead, Projection
from megatron_rl.policy.packing import MicroBatch
from tests.loss_batches import Batch, Share, Split, on_ranks
from tests.loss_recipes import Found, reference_from, spec_of, weights_of
from tests.reference_loss import Recipe

HIDDEN, VOCAB, PADDED = 6, 21, 28
"""The vocabulary is padded to a multiple of 4 ranks; with 2 ranks both shards have rows that count."""
SumOverContext = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class World:
    """What a batch's log-probs are made of. float32."""

    hidden: np.ndarray
    """[T, HIDDEN]."""
    weight: np.ndarray
    """[PADDED, HIDDEN]; NaN beyond the vocabulary."""
    target: np.ndarray
    """int64 [T]."""
    temperature: np.ndarray
    """[S]."""

    @classmethod
    def of(cls, batch: Batch) -> World:
        """Drawn with the batch's seed."""
        rng = np.random.default_rng([batch.seed, 2])
        weight = np.full((PADDED, HIDDEN), np.nan, dtype=np.float32)
        weight[:VOCAB] = 0.7 * rng.standard_normal((VOCAB, HIDDEN))
        return cls(
            hidden=rng.standard_normal((len(batch.mask), HIDDEN)).astype(np.float32),
            weight=weight,
            target=rng.integers(0, VOCAB, len(batch.mask)),
            temperature=rng.choice([0.7, 1.0, 1.3], len(batch.lengths)).astype(np.float32),
        )


def linear_reference(batch: Batch, recipe: Recipe, world: World, given_old: bool) -> tuple[Found, np.ndarray]:
    """The formulas, with gradients by hidden states and weight; and the policy's log-probs [T]."""
    leaves = {
        "hidden": torch.tensor(world.hidden, dtype=torch.float64, requires_grad=True),
        "weight": torch.tensor(world.weight[:VOCAB], dtype=torch.float64, requires_grad=True),
    }
    temperature = torch.from_numpy(world.temperature[batch.response]).double()
    log_p = (leaves["hidden"] @ leaves["weight"].t() / temperature[:, None]).log_softmax(1)
    log_probs = log_p[torch.arange(len(batch.mask)), torch.from_numpy(world.target)]
    found = reference_from(batch, recipe, leaves, log_probs, -(log_p.exp() * log_p).sum(1), given_old)
    return found, log_probs.detach().numpy()


@dataclass(frozen=True)
class Ranks:
    """How the operator is called on this rank."""

    chunk_tokens: int = 4096
    group: dist.ProcessGroup | None = None
    """Tensor-parallel ranks; None = the weight is whole."""
    sequence_parallel: bool = False
    context_rank: int | None = None
    """Of real context-parallel ranks; None: threads stand for all of them."""
    sum_over_context: SumOverContext | None = None


def evaluate_heads(
    batch: Batch, recipe: Recipe, world: World, log_probs: np.ndarray, given_old: bool, split: Split, ranks: Ranks
) -> dict[str, Any]:
    """Sums over this rank's share of every micro-batch: loss, gradients (hidden rows of others stay 0), statistics."""
    inputs = batch.per_token(log_probs)
    inputs["weights"] = weights_of(batch, recipe, log_probs).astype(np.float32)
    if not given_old:
        inputs["old_log_probs"] = None
    total: dict[str, Any] = {"loss": 0.0, "hidden": np.zeros_like(world.hidden), "weight": 0.0, "sums": []}
    for shares in split.shares(batch):
        rank = ranks.context_rank
        if rank is None:
            body = lambda r, reduce, s=shares: _share_loss(batch, recipe, world, inputs, s[r], ranks, reduce)  # noqa: E731
            parts = on_ranks(split.context, body)
        else:
            shares = [shares[rank]]
            parts = [_share_loss(batch, recipe, world, inputs, shares[0], ranks, ranks.sum_over_context)]
        for share, (loss, d_hidden, d_weight, sums) in zip(shares, parts, strict=True):
            assert not d_hidden[share.rows < 0].any()
            total["loss"] += loss
            total["hidden"][share.rows[share.rows >= 0]] += d_hidden[share.rows >= 0]
            total["weight"] = total["weight"] + d_weight
            total["sums"].append(sums)
    return total | {"sums": merge_statistics(total["sums"])}


def as_found(batch: Batch, total: dict[str, Any]) -> Found:
    """What was summed over everything, in the form of the reference."""
    counts = BatchCounts.of(batch.counts)
    sums = {name: value for name, value in total["sums"].items() if name != "loss"}
    gradients = {"hidden": total["hidden"], "weight": total["weight"][:VOCAB]}
    assert not total["weight"][VOCAB:].any()
    return Found(total["loss"], gradients, finalise_metrics(sums, counts))


def _share_loss(
    batch: Batch,
    recipe: Recipe,
    world: World,
    inputs: dict[str, np.ndarray | None],
    share: Share,
    ranks: Ranks,
    sum_over_context: SumOverContext | None,
) -> tuple[float, np.ndarray, np.ndarray, dict[str, Tensor]]:
    """Loss, gradients by this share's rows and by this rank's part of the weight, statistics."""
    size, rank = (1, 0) if ranks.group is None else (dist.get_world_size(ranks.group), dist.get_rank(ranks.group))
    weight = torch.from_numpy(world.weight).chunk(size)[rank].clone().requires_grad_()
    rows = torch.from_numpy(share.take(np.where(batch.mask[:, None], world.hidden, np.nan), np.nan))
    rows = rows.chunk(size)[rank] if ranks.sequence_parallel else rows
    hidden = rows.clone().requires_grad_()
    projection = Projection(VOCAB, ranks.group, ranks.sequence_parallel, ranks.chunk_tokens)
    head = LossHead(spec_of(recipe), projection, with_entropy=True, sum_over_context=sum_over_context)
    loss, _, report = head(micro_batch(batch, world, inputs, share), weight, hidden[None])
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    if size > 1:
        d_weight = _gathered(d_weight, ranks.group)
        d_hidden = _gathered(d_hidden, ranks.group) if ranks.sequence_parallel else d_hidden
    assert not report["non_finite"].any()
    return float(loss.detach()), d_hidden.numpy(), d_weight.numpy(), report["sums"]


def _gathered(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts)


def micro_batch(batch: Batch, world: World, inputs: dict[str, np.ndarray | None], share: Share) -> MicroBatch:
    """What `packing.pack` would make of it, were sequences split over context-parallel ranks."""
    trainable = share.take(batch.mask, False)
    lengths = np.append(batch.counts, 0)[share.responses].astype(np.float64)  # of whole responses; -1 is an added one
    per_token = {
        name: None if values is None else torch.from_numpy(np.where(trainable, share.take(values, 0), 0))
        for name, values in inputs.items()
    }
    nothing = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        tokens=nothing,
        position_ids=nothing,
        targets=torch.from_numpy(np.where(trainable, share.take(world.target, -1), -1)),
        cu_seqlens=torch.tensor([*share.starts, len(share.rows)], dtype=torch.int32),
        sequence_starts=tuple(share.starts) or (0,),
        sequences=Sequences(torch.from_numpy(share.index), torch.from_numpy(lengths)),
        max_seqlen=0,
        temperature=torch.from_numpy(share.take(world.temperature[batch.response], np.nan)),
        destination=share.rows,
        sample_ids=(),
        **per_token,
    )
