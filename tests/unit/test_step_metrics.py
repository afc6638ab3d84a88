"""Metrics of one step: over which samples each is a mean, and what several updates make of theirs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_rl.rollout.wire import RolloutTable
from megatron_rl.step_metrics import batch_metrics, mean_of_updates


def table(rewards: list[float], groups: list[int], lengths: list[int]) -> RolloutTable:
    reward, count = np.array(rewards), len(rewards)
    return RolloutTable(
        group_index=np.array(groups),
        reward=reward,
        correctness=(reward > 0.5).astype(np.float64),
        prompt_length=np.full(count, 3),
        response_length=np.array(lengths),
        trainable_tokens=np.array(lengths),
        valid=np.isfinite(reward),
        truncated=np.array(lengths) >= 8,
        version_first=np.zeros(count, np.int64),
        version_last=np.zeros(count, np.int64),
        informative=np.ones(count, bool),
        sample_ids=[f"s{i}" for i in range(count)],
        sources=["test"],
        components={"format": np.where(np.isfinite(reward), 0.5, np.nan)},
        metrics={"rollout/groups_generated": 2.0},
    )


def test_sequence_metrics_are_means_over_samples_whose_reward_is_known() -> None:
    found = batch_metrics(table([1.0, 0.0, math.nan, 3.0, 1.0], [0, 0, 0, 1, 1], [2, 4, 6, 8, 10]))
    assert found["reward/mean"] == pytest.approx(1.25)
    assert found["reward/correctness"] == pytest.approx(0.75)
    assert found["reward/errors"] == 1
    assert (found["reward/min"], found["reward/max"]) == (0.0, 3.0)
    assert found["reward/format"] == 0.5
    assert found["rollout/response_length_mean"] == 6
    assert (found["rollout/response_length_min"], found["rollout/response_length_max"]) == (2, 10)
    assert found["rollout/prompt_length_mean"] == 3
    assert found["rollout/truncated_fraction"] == pytest.approx(0.4)
    assert found["rollout/groups_generated"] == 2


def test_the_deviation_within_groups_ignores_how_groups_differ() -> None:
    found = batch_metrics(table([0.0, 0.0, 5.0, 7.0, math.nan], [0, 0, 1, 1, 2], [1, 1, 1, 1, 1]))
    assert found["reward/std_within_group"] == pytest.approx((0 + 1) / 2)
    assert found["reward/std"] > 3


def test_without_a_known_reward_there_is_no_number() -> None:
    found = batch_metrics(table([math.nan, math.nan], [0, 0], [1, 1]))
    for name in ("mean", "std", "std_within_group", "min", "max", "correctness"):
        assert math.isnan(found[f"reward/{name}"]), name


def test_updates_are_averaged_and_skipped_ones_are_counted() -> None:
    updates = [{"policy/loss": 1.0, "optimizer/skipped": 1.0}, {"policy/loss": 3.0, "optimizer/skipped": 1.0}]
    assert mean_of_updates(updates) == {"policy/loss": 2.0, "optimizer/skipped": 2.0}


def test_a_step_has_the_largest_gap_of_its_updates() -> None:
    updates = [{"gap/rho_max": 3.0, "gap/max_abs": 0.1}, {"gap/rho_max": 2.0, "gap/max_abs": 0.4}]
    assert mean_of_updates(updates) == {"gap/rho_max": 3.0, "gap/max_abs": 0.4}
