"""From a step's table to its updates: which samples are trained on, and that each of them comes once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_rl.config import Config
from megatron_rl.policy.step_batch import Update, plan_step
from tests.least import least

GROUPS, SIZE, LONGEST = 8, 4, 8


def config(data_parallel_size: int = 1, dynamic_sampling: str = "off", **algorithm: Any) -> Config:
    return least(
        seed=3,
        parallel={"data_parallel_size": data_parallel_size},
        algorithm={"max_tokens_per_microbatch": 24, **algorithm},
        rollout={
            "groups_per_step": GROUPS,
            "group_size": SIZE,
            "max_response_tokens": LONGEST,
            "dynamic_sampling": dynamic_sampling,
        },
    )


def table(seed: int = 0) -> dict[str, np.ndarray]:
    """Rewards that vary in every group; a tenth of the samples is truncated and masked, one reward is missing."""
    rng = np.random.default_rng(seed)
    count = GROUPS * SIZE
    lengths = rng.integers(1, LONGEST + 1, count)
    reward = rng.normal(size=count)
    reward[5] = np.nan
    return {
        "reward": reward,
        "group_index": np.repeat(np.arange(GROUPS), SIZE),
        "prompt_length": rng.integers(1, 9, count),
        "response_length": lengths,
        "trainable_tokens": np.where(rng.random(count) < 0.1, 0, lengths),
        "valid": np.isfinite(reward),
        "informative": np.repeat(np.arange(GROUPS) % 3 > 0, SIZE),
    }


def trained(updates: list[Update]) -> list[int]:
    return [row for update in updates for row in update.samples.tolist()]


@pytest.mark.parametrize("updates", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_sample_with_a_trainable_token_is_trained_on_once(updates: int, ranks: int) -> None:
    samples = table()
    plans = plan_step(samples, config(ranks, updates_per_batch=updates), step=2)
    expected = np.flatnonzero(samples["valid"] & (samples["trainable_tokens"] > 0)).tolist()
    assert len(plans) == updates
    assert sorted(trained(plans)) == expected
    for update in plans:
        shares = [update.local(rank).tolist() for rank in range(ranks)]
        assert sorted(i for share in shares for i in share) == list(range(len(update.samples)))
        groups = set(samples["group_index"][update.samples].tolist())
        others = {g for other in plans if other is not update for g in samples["group_index"][other.samples].tolist()}
        assert not groups & others


def test_every_rank_computes_the_same_plan_and_every_step_another_order() -> None:
    cfg = config(updates_per_batch=4)
    first, again, later = (trained(plan_step(table(), cfg, step)) for step in (0, 0, 1))
    assert first == again
    assert first != later


def test_mask_leaves_groups_of_equal_correctness_out_of_the_update() -> None:
    samples = table()
    (update,) = plan_step(samples, config(dynamic_sampling="mask"), step=0)
    assert samples["informative"][update.samples].all()
    assert (update.tokens == samples["trainable_tokens"][update.samples]).all()


def test_a_batch_without_a_trainable_token_still_has_a_micro_batch_on_every_rank() -> None:
    samples = table()
    samples["trainable_tokens"][:] = 0
    (update,) = plan_step(samples, config(2), step=0)
    assert len(update.samples) == 0
    assert update.plan.num_microbatches >= 1
    assert len(update.plan.microbatches) == 2
