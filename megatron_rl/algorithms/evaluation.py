"""Estimates from repeated samples of held-out prompts, with their uncertainty; running the evaluation is not done here.

No torch: the rollout controller uses it. (numpy, float64)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike


def pass_at_k(n: int, c: int, k: int) -> float:
    """`1 - C(n - c, k) / C(n, k)`, the unbiased chance that one of k samples is right, given c right of n (2107.03374).

    Computed as a product of factors within 0 .. 1, so nothing overflows.

    Raises:
        ValueError: not 1 <= k <= n or not 0 <= c <= n.
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@{k} from {n} samples, {c} of them right: needs 1 <= k <= n and 0 <= right <= n")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def maj_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """How often the most frequent of k answers is right, averaged over the disjoint blocks of k among n samples.

    None is a response without an answer: it does not vote, and a block of such responses is wrong. Answers that tie
    share the vote. The average over blocks is unbiased, since samples of one prompt are exchangeable.

    Args:
        answers: n extracted answers; equal answers compare equal. correct: n; equal answers must agree.
        k: votes per block, 1 <= k <= n.

    Raises:
        ValueError: lengths differ or k does not fit.
    """
    n = len(answers)
    if len(correct) != n or not 1 <= k <= n:
        raise ValueError(f"maj@{k} from {n} answers and {len(correct)} verdicts: needs equal lengths and 1 <= k <= n")
    blocks = [slice(a, a + k) for a in range(0, n - k + 1, k)]
    return sum(_majority(answers[b], correct[b]) for b in blocks) / len(blocks)


def _majority(answers: Sequence[Hashable | None], correct: Sequence[bool]) -> float:
    votes = Counter(a for a in answers if a is not None)
    if not votes:
        return 0.0
    top = max(votes.values())
    right = {a: bool(c) for a, c in zip(answers, correct, strict=True)}
    winners = [a for a, v in votes.items() if v == top]
    return sum(right[a] for a in winners) / len(winners)


def bootstrap_interval(
    values: ArrayLike, *, seed: int, confidence: float = 0.95, resamples: int = 2000
) -> tuple[float, float]:
    """Percentile interval of the mean, resampling PROMPTS: samples of one prompt are not independent of each other.

    Args:
        values: [prompts], one estimate a prompt (its pass@k, say).
        seed: makes the interval reproducible.

    Returns:
        `(low, high)`.

    Raises:
        ValueError: no values.
    """
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or x.size == 0:
        raise ValueError(f"bootstrap of values with shape {x.shape}: needs at least one value per prompt, [prompts]")
    rng = np.random.default_rng(seed)
    means = [x[rng.integers(0, x.size, x.size)].mean() for _ in range(resamples)]
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return float(low), float(high)


def share_interval(shares: ArrayLike, *, seed: int) -> tuple[float, float]:
    """95 % interval of the mean of one share per prompt (its pass@k), each in 0 to 1.

    The bootstrap over prompts; where all prompts agree, resampling would claim certainty (0 of 8 is not "never"), so
    there it is Wilson's score interval for that many prompts (Wilson 1927).

    Args:
        shares: [prompts].
        seed: makes the interval reproducible.

    Raises:
        ValueError: no shares.
    """
    x = np.asarray(shares, dtype=np.float64)
    if x.size and (np.all(x == 0) or np.all(x == 1)):
        edge = _Z95**2 / (x.size + _Z95**2)
        return (0.0, edge) if x[0] == 0 else (1.0 - edge, 1.0)
    return bootstrap_interval(x, seed=seed)


_Z95 = 1.959964
