"""Metrics of one step from the table of its samples and the results of its updates; measures nothing itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_rl.rollout.wire import RolloutTable

SUMMED = ("optimizer/skipped", "routing/rejected_sequences", "routing/live_rows")
"""Metrics of an update that add up over a step."""
LARGEST = ("gap/max_abs", "gap/rho_max", "routing/mismatch_engine_max", "routing/mismatch_old_max")
"""Those of which a step has the largest; all others are averaged."""


def batch_metrics(table: RolloutTable) -> dict[str, float]:
    """Sequence metrics: means over the samples of the batch whose reward is known, whatever the loss is divided by."""
    known = table.valid
    found = {
        "reward/mean": _mean(table.reward[known]),
        "reward/std": float(np.std(table.reward[known])) if known.any() else float("nan"),
        "reward/std_within_group": _mean(_deviations(table.reward[known], table.group_index[known])),
        "reward/min": float(np.min(table.reward[known])) if known.any() else float("nan"),
        "reward/max": float(np.max(table.reward[known])) if known.any() else float("nan"),
        "reward/correctness": _mean(table.correctness[known]),
        "reward/errors": float((~known).sum()),
        "rollout/response_length_mean": _mean(table.response_length),
        "rollout/response_length_min": float(table.response_length.min()) if len(table) else 0.0,
        "rollout/response_length_max": float(table.response_length.max(initial=0)),
        "rollout/prompt_length_mean": _mean(table.prompt_length),
        "rollout/truncated_fraction": _mean(table.truncated),
        **table.metrics,
    }
    return found | {f"reward/{name}": _mean(values[known]) for name, values in table.components.items()}


def mean_of_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One value a step: the mean over its updates, the sum of what is counted, the largest of maxima."""
    names = dict.fromkeys(name for metrics in updates for name in metrics)
    return {name: _combine(name, [m[name] for m in updates if name in m]) for name in names}


def _combine(name: str, values: list[float]) -> float:
    return float(np.sum(values) if name in SUMMED else np.max(values) if name in LARGEST else np.mean(values))


def _deviations(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Standard deviation of the rewards of each group."""
    return np.array([np.std(rewards[groups == group]) for group in np.unique(groups)])


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if values.size else float("nan")
