"""Estimates from repeated samples of held-out prompts, with their uncertainty; running the evaluation is not done here.

No torch: the rollout controller uses it. (numpy, float64)
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 2000
_Z95 = 1.959964


def pass_at_k(n: int, c: int, k: int) -> float:
    """`1 - C(n - c, k) / C(n, k)`, the unbiased chance that one of k samples is right, given c right of n (2107.03374).

    Computed as a product of factors within 0 .. 1, so nothing overflows. 1 <= k <= n and 0 <= c <= n.
    """
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def bootstrap_interval(values: ArrayLike, *, seed: int) -> tuple[float, float]:
    """95 % percentile interval of the mean, resampling PROMPTS: samples of one prompt depend on each other.

    Args:
        values: [prompts], at least one; one estimate a prompt (its pass@k, say).
        seed: makes the interval reproducible.

    Returns:
        `(low, high)`.
    """
    x = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = [x[rng.integers(0, x.size, x.size)].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def share_interval(shares: ArrayLike, *, seed: int) -> tuple[float, float]:
    """95 % interval of the mean of one share per prompt (its pass@k), each in 0 to 1.

    The bootstrap over prompts; where all prompts agree, resampling would claim certainty (0 of 8 is not "never"), so
    there it is Wilson's score interval for that many prompts (Wilson 1927).

    Args:
        shares: [prompts], at least one.
        seed: makes the interval reproducible.
    """
    x = np.asarray(shares, dtype=np.float64)
    if np.all(x == 0) or np.all(x == 1):
        edge = _Z95**2 / (x.size + _Z95**2)
        return (0.0, edge) if x[0] == 0 else (1.0 - edge, 1.0)
    return bootstrap_interval(x, seed=seed)
