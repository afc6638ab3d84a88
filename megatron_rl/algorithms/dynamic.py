"""Which groups are worth training on; drawing more of them is the rollout controller's business. No torch, no numpy."""

from __future__ import annotations

import math
from collections.abc import Iterable

UNIFORM = 1e-6
"""A group whose correctness spans no more than this is uniform."""


def is_informative(correctness: Iterable[float]) -> bool:
    """Whether a group's RAW correctness varies (`max - min > 1e-6`), before any shaping (DAPO, 2503.14476).

    Non-finite values (a verifier that failed) do not count; fewer than two finite ones never vary.
    """
    finite = [c for c in correctness if math.isfinite(c)]
    return len(finite) > 1 and max(finite) - min(finite) > UNIFORM
