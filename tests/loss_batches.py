"""Batches to compute a loss of, drawn by hypothesis, and the ways to split them; holds no tests and no formulas.

A batch is rows end to end, as after packing: row t predicts one token and carries that token's numbers. Ratios stay
away from clip bounds, where two precisions may take different branches.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

Result = TypeVar("Result")

LOG_RATIOS = (-1.5, -0.4, -0.1, 0.0, 0.05, 0.1, 0.4, 1.3)
"""log π/π_old of a token; the clip bounds of the tests lie between."""
SEQUENCE_MEANS = (-0.02, -5e-4, -1e-4, 0.0, 1e-4, 2e-4, 6e-4, 0.02)
"""The same as the mean over a response, for the narrow bounds of GSPO, 3e-4 and 4e-4."""
LOG_RHOS = (-3.0, -1.0, -0.3, 0.0, 0.1, 0.5, 1.2, 3.0)
"""log π_old/μ of a token, away from 0.5, 2 and 5."""
EXTREME = 1e4
GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30)


@dataclass(frozen=True)
class Batch:
    """S responses of T rows in all. Arrays are [T] float64 unless noted."""

    starts: np.ndarray
    """int64 [S + 1]."""
    mask: np.ndarray
    """bool."""
    advantages: np.ndarray
    log_ratio: np.ndarray
    """log π/π_old; likewise log π_old/μ and log π_ref/π."""
    log_rho: np.ndarray
    log_reference: np.ndarray
    seed: int
    """For whatever else is random."""

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    @property
    def counts(self) -> np.ndarray:
        """int64 [S], trainable rows N_i of each response."""
        return np.array([self.mask[a:b].sum() for a, b in zip(self.starts, self.starts[1:], strict=False)], dtype=int)

    @property
    def response(self) -> np.ndarray:
        """int64 [T], the response of each row."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def per_token(self, log_probs: np.ndarray, dtype: Any = np.float32) -> dict[str, np.ndarray]:
        """Inputs of the loss [T] for a policy with these log-probs, garbage at masked rows."""
        old = (log_probs - self.log_ratio).astype(dtype)
        arrays = {
            "advantages": self.advantages,
            "old_log_probs": old,
            "behaviour_log_probs": old - self.log_rho,
            "reference_log_probs": log_probs + self.log_reference,
        }
        return {name: self.soil(values.astype(dtype)) for name, values in arrays.items()}

    def soil(self, values: np.ndarray) -> np.ndarray:
        """The values with NaN, inf and large numbers at masked rows."""
        garbage = np.random.default_rng(self.seed).choice(GARBAGE, size=self.mask.shape)
        return np.where(self.mask, values, garbage.astype(values.dtype))


@st.composite
def batches(draw: st.DrawFn, sequence_level: bool = False, mean_rho_bounds: tuple[float, float] | None = None) -> Batch:
    """Uneven responses, some of one row, some fully masked.

    Args:
        sequence_level: ratios whose mean over a response lies near the bounds of GSPO.
        mean_rho_bounds: the geometric mean of ρ over a response keeps away from these.
    """
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6), label="lengths")
    seed = draw(st.integers(0, 2**32 - 1), label="seed")
    extremes = draw(st.sampled_from([0.0, 0.0, 0.1]), label="share of extreme log-ratios")
    all_masked = draw(st.sampled_from([0.0, 0.2, 0.2, 1.0]), label="share of masked responses")
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    total = int(starts[-1])
    mask = rng.random(total) > 0.3
    advantages = np.zeros(total)
    log_ratio, log_rho = rng.choice(LOG_RATIOS, size=total), rng.choice(LOG_RHOS, size=total)
    for a, b in itertools.pairwise(starts):
        mask[a:b] &= rng.random() >= all_masked
        advantages[a:b] = rng.choice([-1.3, -0.4, 0.3, 1.1, 0.0], p=[0.25, 0.25, 0.25, 0.2, 0.05])
        live = a + np.flatnonzero(mask[a:b])
        if sequence_level and len(live):
            noise = 0.2 * rng.standard_normal(len(live))
            log_ratio[live] = noise - noise.mean() + rng.choice(SEQUENCE_MEANS)
        for bound in np.log(mean_rho_bounds) if mean_rho_bounds and len(live) else ():
            if abs(log_rho[live].mean() - bound) < 0.01:
                log_rho[live] += 0.02
    for values in (log_ratio, log_rho):
        values[rng.random(total) < extremes] = EXTREME * rng.choice([-1, 1])
    log_reference = rng.choice((-0.3, 0.2, 0.6), size=total)
    log_reference[rng.random(total) < extremes / 3] = EXTREME * rng.choice([-1, 1])
    return Batch(starts, mask, advantages, log_ratio, log_rho, log_reference, seed)


# ------------------------------------------------------------------------------------------------------------ splitting


@dataclass(frozen=True)
class Share:
    """The rows of one rank in one micro-batch."""

    rows: np.ndarray
    """int64 [t] into the batch, -1 for a row that was added."""
    index: np.ndarray
    """int64 [t], response of each row within the micro-batch."""
    responses: np.ndarray
    """int64 [s], the responses of the micro-batch, -1 for one that was added."""

    def take(self, values: np.ndarray, fill: Any) -> np.ndarray:
        """[t] of a batch's array [T, ...], `fill` in added rows."""
        taken = np.full((len(self.rows), *values.shape[1:]), fill, dtype=values.dtype)
        taken[self.rows >= 0] = values[self.rows[self.rows >= 0]]
        return taken

    @property
    def starts(self) -> list[int]:
        """First row of every response that has one here; rows of a response lie together."""
        return [int(i) for i in np.flatnonzero(np.diff(self.index, prepend=-1))]


@dataclass(frozen=True)
class Split:
    """Micro-batches of all data-parallel ranks, each over `context` ranks in zig-zag order, with rows added."""

    groups: tuple[tuple[int, ...], ...]
    """Responses of each micro-batch, in packing order."""
    context: int = 1
    padding: int = 0
    """Masked rows at the end of each share."""
    masked: int = 0
    """Rows of an added fully masked response in each micro-batch."""
    even: bool = False
    """Each response is padded so that all context-parallel ranks have equally many of its rows."""
    multiple: int = 1
    """The padding is such that each share has a multiple of this many rows, at least one of them."""

    def shares(self, batch: Batch) -> list[list[Share]]:
        """By micro-batch and context-parallel rank."""
        return [[self._share(batch, group, rank) for rank in range(self.context)] for group in self.groups]

    def _share(self, batch: Batch, group: Sequence[int], rank: int) -> Share:
        parts = [self._zigzag(np.arange(batch.starts[i], batch.starts[i + 1]), rank) for i in group]
        padding = self.padding
        if self.multiple > 1:
            rows = sum(map(len, parts)) + self.masked + padding
            padding += -rows % self.multiple if rows else self.multiple
        extra = [np.full(n, -1) for n in (self.masked, padding) if n]
        lengths = [len(part) for part in parts + extra]
        responses = np.array([*group, *[-1] * len(extra)], dtype=np.int64)
        index = np.repeat(np.arange(len(responses)), lengths)
        return Share(np.concatenate([*parts, *extra, np.zeros(0, dtype=np.int64)]).astype(int), index, responses)

    def _zigzag(self, rows: np.ndarray, rank: int) -> np.ndarray:
        if self.context == 1:
            return rows
        if self.even:
            rows = np.pad(rows, (0, -len(rows) % (2 * self.context)), constant_values=-1)
        chunks = np.array_split(rows, 2 * self.context)
        return np.concatenate([chunks[rank], chunks[-1 - rank]])


@st.composite
def splits(draw: st.DrawFn, responses: int, even: bool = False) -> Split:
    """Any order, any micro-batches (empty ones too), one or two context-parallel ranks, added rows."""
    order = draw(st.permutations(range(responses)), label="order")
    cuts = sorted(draw(st.lists(st.integers(0, responses), max_size=4), label="cuts"))
    edges = [0, *cuts, responses]
    groups = tuple(tuple(order[a:b]) for a, b in itertools.pairwise(edges))
    context = draw(st.sampled_from([1, 2, 3]), label="context-parallel ranks")
    return Split(groups, context, draw(st.integers(0, 3)), draw(st.integers(0, 2)), even)


def drawn(strategy: st.SearchStrategy[Result], size: Callable[[Result], float], tries: int = 5) -> Result:
    """One value, always the same one: the largest of a few, since the first ones are the simplest."""
    found: list[Result] = []

    @settings(max_examples=tries, derandomize=True, database=None, phases=[Phase.generate], deadline=None)
    @given(strategy)
    def collect(value: Result) -> None:
        found.append(value)

    collect()
    return max(found, key=size)


class ThreadSum:
    """A sum over threads, each of which stands for a rank: all of them must call it, as with a collective."""

    def __init__(self, size: int) -> None:
        self._barrier, self._parts, self.calls = threading.Barrier(size, timeout=30), {}, 0

    def __call__(self, values: Tensor) -> Tensor:
        self._parts[threading.get_ident()] = values
        self._barrier.wait()
        shapes = {tuple(part.shape) for part in self._parts.values()}
        assert len(shapes) == 1, f"ranks sum different shapes: {shapes}"
        total = torch.stack(list(self._parts.values())).sum(0)
        self.calls += self._barrier.wait() == 0
        return total

    def abort(self) -> None:
        self._barrier.abort()


def on_ranks(size: int, function: Callable[[int, ThreadSum | None], Result]) -> list[Result]:
    """`function(rank, all-reduce)` on `size` ranks; results by rank. Alone it gets no all-reduce."""
    if size == 1:
        return [function(0, None)]
    reduce, results, errors = ThreadSum(size), {}, []

    def body(rank: int) -> None:
        try:
            results[rank] = function(rank, reduce)
        except BaseException as error:  # shown by the caller
            errors.append(error)
            reduce.abort()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [results[rank] for rank in range(size)]
