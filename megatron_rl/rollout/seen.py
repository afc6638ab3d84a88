"""What sampling saw between two batches, and the `rollout/...` metrics that come of it. Nothing is decided here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron_rl.algorithms.staleness import staleness_metrics, token_versions

from .pool import Choice
from .sample import Group

Ages = list[NDArray[np.int64]]
"""int64 [N_i] of every sample."""


@dataclass
class Seen:
    """Counts since the batch before was complete."""

    started: int = 0
    finished: int = 0
    resumed_tokens: int = 0
    stale_groups: int = 0
    pass_rates: Counter[float] = field(default_factory=Counter)

    def finish(self, group: Group) -> None:
        """A group is judged."""
        self.finished += 1
        rate = group.pass_rate
        self.pass_rates[round(rate, 2) if math.isfinite(rate) else math.nan] += 1  # one NaN: one key

    @property
    def rates_in_words(self) -> str:
        """`0: 9, 1: 9`, mean correctness and groups that had it."""
        rates = sorted(self.pass_rates.items(), key=lambda rate: (math.isnan(rate[0]), rate[0]))
        words = ", ".join(f"{rate:g}: {count}" for rate, count in rates)
        failed = any(map(math.isnan, self.pass_rates))
        return words + (" (nan: a verifier or an environment failed; the controller's log says how)" if failed else "")


def tokens_of(group: Group) -> int:
    """Response tokens that a group has."""
    return sum(sample.response_length for sample in group.samples)


def choice_metrics(
    choice: Choice, chosen: Iterable[Group], mask: bool, round_: int, epoch_size: int
) -> dict[str, float]:
    """What became of the groups that a batch was chosen from. Groups given back do not count: timing does not show.

    Args:
        choice: the batch and what was dropped for it.
        chosen: its groups.
        mask: uninformative groups stay in the batch, and count as dropped.
        round_: groups that run at once for one batch.
        epoch_size: prompts in one pass.
    """
    dropped = len(choice.filtered) + (sum(not group.informative for group in chosen) if mask else 0)
    looked_at = [*choice.batch, *choice.filtered]
    return {
        "rollout/groups_generated": float(len(looked_at)),
        "rollout/groups_dropped_fraction": dropped / len(looked_at),
        "rollout/sample_rounds": float(math.ceil(len(looked_at) / round_)),
        "rollout/epoch": float(max(looked_at) // epoch_size),
    }


def ages_of(groups: Iterable[Group], step: int) -> Ages:
    """For every sample the staleness in `step` of its trainable tokens. To be asked before any is masked for it."""
    samples = [sample for group in groups for sample in group.samples]
    return [step - token_versions(sample.spans)[sample.loss_mask] for sample in samples]


def staleness_of_batch(
    ages: Ages,
    others: Collection[Group],
    seen: Seen,
    choice: Choice,
    step: int,
    max_staleness: int,
    masked: int,
) -> dict[str, float]:
    """How old the tokens of a batch are, and what waits beside it.

    Args:
        ages: see `ages_of`.
        others: all groups alive that are not looked at for the batch.
        seen: counts since the batch before.
        choice: the groups of the batch.
        step: whose batch it is; its weights are version `step`.
        max_staleness: the limit of the run.
        masked: of these tokens, those that were taken out of the loss for their age.
    """
    waiting = [step - group.version_first for group in others]
    tokens = sum(map(len, ages))
    return {
        **{f"rollout/staleness_{name}": value for name, value in staleness_metrics(ages, max_staleness).items()},
        "rollout/stale_masked_fraction": masked / max(1, tokens),
        "rollout/stale_groups_dropped": float(seen.stale_groups),
        "rollout/stale_dropped_fraction": seen.stale_groups / (seen.stale_groups + len(choice.batch)),
        "rollout/resumed_tokens": float(seen.resumed_tokens),
        "rollout/pool_groups": float(len(others)),
        "rollout/pool_groups_partial": float(sum(bool(group.unfinished) for group in others)),
        "rollout/pool_age_mean": sum(waiting) / max(1, len(waiting)),
        "rollout/pool_age_max": float(max(waiting, default=0)),
    }


def responses_at_work(ids: Collection[int], known: Mapping[int, Group], group_size: int) -> int:
    """Responses of the groups `ids` that have not ended; all of a group that is not `known` yet: it is to begin."""
    return sum(len(known[i].unfinished) if i in known else group_size for i in ids)
