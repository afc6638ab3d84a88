"""What shaping, filters and the shuffled control do to the rewards and masks of one group."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from megatron_rl.config import Config
from megatron_rl.rollout.sample import Group, Span
from megatron_rl.rollout.scoring import shape
from tests.least import least

LENGTHS = (2, 6, 8, 8)
"""The longest responses are cut at the limit of 8."""


def config(reward: dict[str, Any] | None = None, seed: int = 1, **rollout: Any) -> Config:
    return least(
        seed=seed,
        reward={"components": [{"name": "exact"}], **(reward or {})},
        rollout={"max_response_tokens": 8, "dynamic_sampling": "off", **rollout},
    )


def group(correctness: tuple[float, ...], totals: tuple[float, ...] | None = None, group_id: int = 0) -> Group:
    made = Group.start(group_id, "p", np.array([1, 2]), len(LENGTHS), run_seed=0, version=0, temperature=1.0)
    for sample, length, right, total in zip(made.samples, LENGTHS, correctness, totals or correctness, strict=True):
        sample.append([5] * length, [-1.0] * length, [Span(0, 0, length)])
        sample.finish("length" if length == 8 else "stop")
        sample.score(total, right, {"exact": right})
    return made


def rewards(made: Group) -> list[float]:
    return [sample.reward for sample in made.samples]


def trained(made: Group) -> list[bool]:
    return [sample.trainable_tokens > 0 for sample in made.samples]


def test_the_overlong_punishment_is_added_to_the_total_and_not_to_correctness() -> None:
    made = group((1.0, 0.0, 1.0, 0.0))
    shape(made, config(overlong_cache=4, overlong_scale=0.5))
    assert rewards(made) == [1.0, -0.25, 0.5, -0.5]
    assert [s.correctness for s in made.samples] == [1.0, 0.0, 1.0, 0.0]
    assert all(trained(made))


@pytest.mark.parametrize("mode", ["mask", "off"])
def test_a_group_of_equal_raw_correctness_is_masked_although_shaping_tells_its_samples_apart(mode: str) -> None:
    made = group((1.0, 1.0, 1.0, 1.0), totals=(1.1, 1.0, 1.1, 1.0))
    shape(made, config(overlong_cache=4, dynamic_sampling=mode))
    assert len(set(rewards(made))) > 1
    assert trained(made) == [mode == "off"] * 4


def test_a_group_of_varying_raw_correctness_is_trained_on_although_its_totals_are_equal() -> None:
    made = group((1.0, 0.0, 1.0, 0.0), totals=(0.5, 0.5, 0.5, 0.5))
    shape(made, config(dynamic_sampling="mask"))
    assert all(trained(made))


def test_the_overlong_filter_masks_truncated_samples_and_leaves_their_rewards() -> None:
    made = group((1.0, 0.0, 1.0, 0.0))
    shape(made, config(overlong_filter=True))
    assert trained(made) == [True, True, False, False]
    assert rewards(made) == [1.0, 0.0, 1.0, 0.0]


def test_a_sample_that_no_verifier_could_judge_is_not_trained_on() -> None:
    made = group((1.0, math.nan, 0.0, 0.0))
    shape(made, config(dynamic_sampling="mask"))
    assert trained(made) == [True, False, True, True]


def test_the_shuffled_control_permutes_shaped_rewards_together_with_correctness() -> None:
    orders = set()
    for group_id in range(20):
        plain, shuffled = (group((1.0, 0.0, 1.0, 0.0), group_id=group_id) for _ in range(2))
        shape(plain, config(overlong_cache=4))
        shape(shuffled, config({"shuffle": True}, overlong_cache=4))
        pairs = [[(s.reward, s.correctness) for s in made.samples] for made in (plain, shuffled)]
        assert sorted(pairs[0]) == sorted(pairs[1])
        assert [s.components for s in shuffled.samples] == [s.components for s in plain.samples]
        orders.add(tuple(rewards(shuffled)))
    assert len(orders) > 10


def test_the_permutation_follows_the_seed_and_the_group() -> None:
    def shuffled(seed: int) -> list[float]:
        made = group((0.1, 0.2, 0.3, 0.4), group_id=7)
        shape(made, config({"shuffle": True}, seed=seed))
        return rewards(made)

    assert shuffled(1) == shuffled(1)
    assert len({tuple(shuffled(seed)) for seed in range(10)}) > 3
