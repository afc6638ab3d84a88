"""The punishment of overlong responses; which of them leave the loss is decided in `rollout.scoring`.

Plain Python, no torch: the rollout controller uses it. Totals are made in `rewards`, groups compared in `advantages`.
"""

from __future__ import annotations


def overlong_penalty(length: int, max_length: int, cache: int, scale: float = 1.0) -> float:
    """DAPO's soft punishment (2503.14476, eq. 13), to be added to the total reward.

        0                                           length <= L_max - L_cache
        -scale (length - (L_max - L_cache)) / L_cache    up to L_max
        -scale                                      beyond

    Args:
        length: response tokens. max_length: L_max, which includes the cache. cache: L_cache, 1 .. L_max. scale: size
            of the full punishment.
    """
    excess = length - (max_length - cache)
    return -scale * min(1.0, excess / cache) if excess > 0 else 0.0
