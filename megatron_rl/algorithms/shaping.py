"""How raw scores become a sample's total reward: range mapping, the weighted total, and what overlong responses get.

Plain Python, no torch: the rollout controller uses it. Verifiers are in `rewards`, group comparison in `advantages`.
"""

from __future__ import annotations

from collections.abc import Sequence


def map_range(value: float, low: float, high: float) -> float:
    """`(value - low) / (high - low)`, limited to 0 .. 1. NaN stays NaN (the sample is then masked, not scored).

    Raises:
        ValueError: `low` is not below `high`.
    """
    if not low < high:
        raise ValueError(f"range=[{low}, {high}]: the first bound must be the smaller")
    mapped = (value - low) / (high - low)
    return mapped if mapped != mapped else min(1.0, max(0.0, mapped))


def weighted_total(
    scores: Sequence[float], weights: Sequence[float], ranges: Sequence[tuple[float, float] | None]
) -> float:
    """`Σ_k weight_k · component_k`, each component mapped from its range first where it has one."""
    terms = zip(scores, weights, ranges, strict=True)
    return float(sum(w * (s if r is None else map_range(s, *r)) for s, w, r in terms))


def overlong_penalty(length: int, max_length: int, cache: int, scale: float = 1.0) -> float:
    """DAPO's soft punishment (2503.14476, eq. 13), to be added to the total reward.

        0                                           length <= L_max - L_cache
        -scale (length - (L_max - L_cache)) / L_cache    up to L_max
        -scale                                      beyond

    Args:
        length: response tokens. max_length: L_max, which includes the cache. cache: L_cache. scale: size of the full
            punishment.

    Raises:
        ValueError: `cache` is not within 1 .. max_length.
    """
    if not 0 < cache <= max_length:
        raise ValueError(f"overlong_cache={cache}: it must be within 1 .. {max_length} (the longest response)")
    excess = length - (max_length - cache)
    return -scale * min(1.0, max(0.0, excess / cache)) if excess > 0 else 0.0


def overlong_filtered(truncated: bool, overlong_filter: bool) -> bool:
    """Whether a sample leaves the loss. It stays in its group's statistics: only its tokens are masked."""
    return overlong_filter and truncated
