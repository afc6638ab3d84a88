"""Which sequence goes into which micro-batch of which data-parallel rank; pure, no torch and no process group here.

Invariants of a `Plan` (property-tested):
1. every sequence occurs exactly once, over all ranks and micro-batches;
2. every rank has the same number of micro-batches, a multiple of `multiple_of` and at least one, so that all ranks
   run the same collectives; a micro-batch may be empty and is then packed as one masked dummy sequence;
3. no micro-batch holds more than `max_tokens` tokens; a sequence that alone is longer is refused;
4. sequences are dealt longest first to the rank with the fewest tokens, so that two ranks differ by at most the
   longest sequence;
5. the plan depends on the arguments alone: every rank computes the same one without communicating.

`max_tokens` counts whole sequences (prompt and response), each rounded up to `sequence_multiple`: what short ones are
padded to takes memory, too. A packed micro-batch has one row less per sequence (the last token predicts nothing) plus
padding to a multiple of `parallel.row_multiple`, so its rows stay within `max_tokens` whenever
`max_tokens` is itself such a multiple. Of these rows each context-parallel rank has its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CAP_KEY = "algorithm.max_tokens_per_microbatch"


@dataclass(frozen=True)
class Plan:
    """Micro-batches of every data-parallel rank, as indices into the `lengths` that were planned.

    Attributes:
        microbatches: `microbatches[dp_rank][i]` is the tuple of sequence indices of that rank's i-th micro-batch.
    """

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per rank, the same on every rank."""
        return len(self.microbatches[0])

    def sequences(self, dp_rank: int) -> tuple[int, ...]:
        """Indices of all sequences of one rank, ascending: what this rank pulls, in the order it keeps them."""
        return tuple(sorted(i for microbatch in self.microbatches[dp_rank] for i in microbatch))

    def local(self, dp_rank: int) -> tuple[tuple[int, ...], ...]:
        """This rank's micro-batches as positions within `sequences(dp_rank)`."""
        position = {index: i for i, index in enumerate(self.sequences(dp_rank))}
        return tuple(tuple(position[i] for i in microbatch) for microbatch in self.microbatches[dp_rank])


def plan_microbatches(
    lengths: Sequence[int] | np.ndarray,
    dp_size: int,
    max_tokens: int,
    multiple_of: int = 1,
    sequence_multiple: int = 1,
) -> Plan:
    """Deal sequences to data-parallel ranks, then each rank's sequences to micro-batches.

    Args:
        lengths: tokens of every sequence of the whole batch, all ranks.
        dp_size: number of data-parallel ranks.
        max_tokens: cap on the tokens of one micro-batch (`algorithm.max_tokens_per_microbatch`).
        multiple_of: the count of micro-batches is rounded up to a multiple of this (the group size of Megatron's
            interleaved schedule; 1 otherwise).
        sequence_multiple: each sequence is packed as a multiple of so many rows.

    Raises:
        ValueError: for a sequence longer than `max_tokens`, naming its position and the key to change.

    >>> plan_microbatches([4, 3, 3, 2], dp_size=2, max_tokens=4).microbatches
    (((0,), (3,)), ((1,), (2,)))
    """
    sizes = [int(length) + -int(length) % sequence_multiple for length in lengths]
    _refuse_too_long(lengths, sizes, max_tokens)
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    ranks = _deal(order, sizes, dp_size)
    count = max(1, *(len(_first_fit(rank, sizes, max_tokens)) for rank in ranks))
    count = -(-count // multiple_of) * multiple_of
    return Plan(tuple(_spread(rank, sizes, max_tokens, count) for rank in ranks))


def _refuse_too_long(lengths: Sequence[int] | np.ndarray, sizes: list[int], max_tokens: int) -> None:
    for i, size in enumerate(sizes):
        if size > max_tokens:
            rounded = f" (padded to {size})" if size > lengths[i] else ""
            raise ValueError(
                f"sample number {i} has {lengths[i]} tokens{rounded}, more than {CAP_KEY}={max_tokens}: "
                f"raise {CAP_KEY} to at least {size}, or lower rollout.max_prompt_tokens or rollout.max_response_tokens"
            )


def _deal(order: Sequence[int], sizes: list[int], bins: int) -> list[list[int]]:
    """Longest-processing-time rule: each next (shorter) sequence goes to the least loaded bin, ties to the first."""
    dealt: list[list[int]] = [[] for _ in range(bins)]
    load = [0] * bins
    for i in order:
        target = min(range(bins), key=load.__getitem__)
        dealt[target].append(i)
        load[target] += sizes[i]
    return dealt


def _first_fit(order: Sequence[int], sizes: list[int], max_tokens: int) -> list[list[int]]:
    """First-fit decreasing: few bins, each within the cap."""
    bins: list[list[int]] = []
    free: list[int] = []
    for i in order:
        target = next((b for b, room in enumerate(free) if sizes[i] <= room), None)
        if target is None:
            bins.append([])
            free.append(max_tokens)
            target = len(bins) - 1
        bins[target].append(i)
        free[target] -= sizes[i]
    return bins


def _spread(order: Sequence[int], sizes: list[int], max_tokens: int, count: int) -> tuple[tuple[int, ...], ...]:
    """`count` micro-batches for one rank: evenly loaded where the cap allows, else first-fit and empty ones."""
    bins = _deal(order, sizes, count)
    if any(sum(sizes[i] for i in b) > max_tokens for b in bins):
        bins = _first_fit(order, sizes, max_tokens)
        bins += [[] for _ in range(count - len(bins))]
    return tuple(tuple(b) for b in bins)
