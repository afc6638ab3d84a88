"""How old tokens are, and which of them leave the loss for it; numpy, since it is decided where batches are made.

Weights version k trains step k. A token that version v sampled is k - v published versions behind when step k trains on
it: its staleness. What is done about old tokens that stay in the loss is in `corrections`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


def token_versions(spans: Iterable[tuple[int, int, int]]) -> NDArray[np.int64]:
    """int64 [T], the weights version of every token.

    `spans` are (version, start, end), without gaps and in order, from 0 on.

    >>> token_versions([(4, 0, 2), (5, 2, 3)]).tolist()
    [4, 4, 5]
    """
    parts = [np.full(end - start, version, np.int64) for version, start, end in spans]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def stale_tokens(versions: NDArray[np.int64], newest: int, max_staleness: int) -> NDArray[np.bool_]:
    """bool [T]: tokens that are more than `max_staleness` published versions behind `newest`.

    They are to leave the mask before anything is counted (`mask_stale_tokens`).
    """
    return newest - versions > max_staleness


def off_policy_tokens(versions: NDArray[np.int64], newest: int) -> NDArray[np.bool_]:
    """bool [T]: tokens that the `newest` published version has not sampled (`mask_off_policy_tokens`)."""
    return versions != newest


def staleness_metrics(ages: Sequence[NDArray[np.int64]], max_staleness: int) -> dict[str, float]:
    """Mean, largest, and the share of tokens at each age from 0 to `max_staleness`; what is older counts as `over`.

    Args:
        ages: int64 [N_i] of every sequence, the staleness of its trainable tokens; all together are the denominator.
        max_staleness: the limit of the run.

    >>> staleness_metrics([np.array([0, 0, 1]), np.array([3])], 1)
    {'mean': 1.0, 'max': 3.0, 'share_0': 0.5, 'share_1': 0.25, 'share_over': 0.25}
    """
    tokens = np.concatenate([np.empty(0, np.int64), *ages])
    count = max(1, len(tokens))
    shares = {f"share_{age}": float(np.sum(tokens == age)) / count for age in range(max_staleness + 1)}
    return {
        "mean": float(np.sum(tokens)) / count,
        "max": float(np.max(tokens, initial=0)),
        **shares,
        "share_over": float(np.sum(tokens > max_staleness)) / count,
    }
