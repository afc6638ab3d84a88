"""What all ranks found in their micro-batches, as one answer on every rank; no metric is divided here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms.normalisation import BatchCounts
from megatron_rl.algorithms.token_statistics import MAXIMA, SUMS, merge_statistics
from megatron_rl.policy.batch import SequenceBatch
from megatron_rl.policy.distributed import device
from megatron_rl.policy.packing import MicroBatch

ADDED = ("loss", *sorted(SUMS))
LARGEST = tuple(sorted(MAXIMA))


@dataclass(frozen=True)
class Totals:
    """Equal on all ranks.

    Attributes:
        sums: statistics by name (`algorithms.token_statistics`, and `loss`), merged over everything.
        counts: trainable tokens and sequences of the whole batch.
        non_finite_tokens: trainable tokens with a value that is not finite.
        grad_norm: the norm that was passed in.
        finite: loss, inputs and gradient are finite on every rank.
    """

    sums: dict[str, float]
    counts: BatchCounts
    non_finite_tokens: int
    grad_norm: float
    finite: bool


def reduce_reports(batch: SequenceBatch, reports: list[dict[str, Any]], grad_norm: float) -> Totals:
    """Merge the reports of `LossHead` over micro-batches and data-parallel ranks, for all ranks. Collective.

    Of each model replica only tensor rank 0 of the last pipeline stage reports; every other rank adds zeros, except for
    its verdict on the gradient. Context-parallel ranks each have other rows of the same sequences: all of them add
    theirs, and the first one counts the sequences. What merges by maximum is never negative: -1 is no report.
    """
    from megatron.core import parallel_state

    sums: dict[str, float] = {}
    non_finite = tokens = sequences = 0
    if reports and parallel_state.get_tensor_model_parallel_rank() == 0:
        sums = {name: float(value) for name, value in merge_statistics(report["sums"] for report in reports).items()}
        non_finite = sum(int(report["non_finite"].sum()) for report in reports)
        if parallel_state.get_context_parallel_rank() == 0:
            tokens, sequences = int(batch.mask.sum()), int((batch.trainable_counts > 0).sum())
    counts = [not math.isfinite(grad_norm), non_finite, tokens, sequences]
    added = _reduced([*counts, *(sums.get(name, 0.0) for name in ADDED)], dist.ReduceOp.SUM)
    present = [name in sums for name in ADDED]
    largest = _reduced([*present, *(sums.get(name, -1.0) for name in LARGEST)], dist.ReduceOp.MAX)
    totals = {name: value for name, value, there in zip(ADDED, added[4:], largest, strict=False) if there}
    totals |= {name: value for name, value in zip(LARGEST, largest[len(ADDED) :], strict=True) if value != -1}
    return Totals(
        sums=totals,
        counts=BatchCounts(tokens=int(added[2]), sequences=int(added[3])),
        non_finite_tokens=int(added[1]),
        grad_norm=grad_norm,
        finite=added[0] == 0 and added[1] == 0 and math.isfinite(totals["loss"]),
    )


def gather_non_finite_samples(microbatches: list[MicroBatch], reports: list[dict[str, Any]]) -> list[str]:
    """Ids of the samples with a marked row, of all ranks, sorted. Collective; for the rare update that is skipped."""
    names: list[str] = []
    for microbatch, report in zip(microbatches, reports, strict=False):  # only the last stage has reports
        sequences = microbatch.sequences.index[report["non_finite"]]
        names += [microbatch.sample_ids[i] for i in sequences.unique().tolist()]
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, names)
    return sorted({name for part in gathered for name in part})


def all_ranks_agree(condition: bool) -> bool:
    """True when `condition` holds on every rank. Collective."""
    return bool(_reduced([condition], dist.ReduceOp.MIN)[0])


def largest_of_all_ranks(value: float) -> float:
    """The largest `value` of any rank. Collective."""
    return _reduced([value], dist.ReduceOp.MAX)[0]


def _reduced(values: Sequence[float], operation: Any) -> list[float]:
    """Each of `values` over all ranks, in float64. Collective."""
    found = torch.tensor(values, dtype=torch.float64, device=device())
    dist.all_reduce(found, op=operation)
    return found.tolist()


def rows_of_all_ranks(rows: np.ndarray) -> np.ndarray:
    """float32 [*, T], what the last pipeline stage has of each token, whichever context-parallel rank had its row.

    Collective over the model replica. Each token is one rank's, and 0 on the others, so that the sum is exact; stages
    before the last may pass anything.
    """
    from megatron.core import parallel_state

    tensor = torch.from_numpy(rows).to(device())
    if parallel_state.get_context_parallel_world_size() > 1:
        dist.all_reduce(tensor, group=parallel_state.get_context_parallel_group())
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(tensor, src=source, group=parallel_state.get_pipeline_model_parallel_group())
    return tensor.cpu().numpy()


def sum_over_context() -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Adds up a tensor over the ranks that share this rank's sequences; None where sequences are whole."""
    from megatron.core import parallel_state

    if parallel_state.get_context_parallel_world_size() == 1:
        return None

    def summed(values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        dist.all_reduce(values, group=parallel_state.get_context_parallel_group())
        return values

    return summed
