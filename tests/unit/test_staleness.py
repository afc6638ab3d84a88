"""How old tokens are and which leave the loss for it; what a batch of old tokens must be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms.staleness import off_policy_tokens, stale_tokens, staleness_metrics, token_versions
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.rollout.acceptance import (
    SamplingError,
    mask_old_tokens,
    require_published_versions,
    require_started_version,
)
from megatron_rl.rollout.pool import Choice
from megatron_rl.rollout.sample import Group, Span
from megatron_rl.rollout.seen import Seen, ages_of, staleness_of_batch


def group_of(versions: list[list[int]], started: int = 0) -> Group:
    """One sample for each list, with a token of each version."""
    group = Group.start(5, "p", np.arange(3), len(versions), run_seed=0, version=started, temperature=1.0)
    for sample, tokens in zip(group.samples, versions, strict=True):
        sample.append([1] * len(tokens), [-1.0] * len(tokens), [Span(v, i, i + 1) for i, v in enumerate(tokens)])
    return group


def off_policy(**values: Any) -> RolloutConfig:
    return RolloutConfig.model_validate({"partial_rollouts": True, "max_staleness": 1, **values})


def test_staleness_counts_published_versions():
    versions = np.array([7, 6, 5, 4, 3])
    assert stale_tokens(versions, newest=7, max_staleness=2).tolist() == [False, False, False, True, True]
    assert off_policy_tokens(versions, newest=7).tolist() == [False, True, True, True, True]


@given(st.lists(st.integers(0, 9), max_size=20).map(sorted))
def test_every_token_has_the_version_of_its_span(versions):
    assert token_versions(group_of([versions]).samples[0].spans).tolist() == versions


@given(st.lists(st.lists(st.integers(0, 6), max_size=5), min_size=1, max_size=4), st.integers(0, 4))
def test_shares_add_up_to_all_tokens(ages, limit):
    found = staleness_metrics([np.array(a, np.int64) for a in ages], limit)
    tokens = [age for sequence in ages for age in sequence]
    assert sum(v for name, v in found.items() if name.startswith("share_")) == pytest.approx(1.0 if tokens else 0.0)
    assert found["max"] == max(tokens, default=0)
    assert found["mean"] == pytest.approx(np.mean(tokens) if tokens else 0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"stale_policy": "mask_stale_tokens"}, [[0, 1, 1], [1]]),
        ({"stale_policy": "keep_with_correction"}, [[1, 1, 1], [1]]),
        ({"stale_policy": "keep_with_correction", "mask_off_policy_tokens": True}, [[0, 0, 1], [1]]),
    ],
)
def test_old_tokens_leave_the_loss_as_configured(values, expected):
    group = group_of([[3, 4, 5], [5]])
    masked = mask_old_tokens([group], off_policy(**values), step=5)
    assert [sample.loss_mask.tolist() for sample in group.samples] == expected
    assert masked == 4 - sum(map(sum, expected))


def test_ages_and_masked_tokens_are_counted_over_what_was_trainable_before_masking():
    group = group_of([[3, 4, 5], [2, 2, 2]])
    group.samples[0].append_observation([7] * 4)  # counts as version 5
    group.samples[1].exclude()
    ages = ages_of([group], 5)
    masked = mask_old_tokens([group], off_policy(stale_policy="mask_stale_tokens"), step=5)
    found = staleness_of_batch(ages, [], Seen(), Choice([5], []), step=5, max_staleness=1, masked=masked)
    assert found["rollout/staleness_mean"] == 1.0
    assert found["rollout/staleness_max"] == 2.0
    assert found["rollout/staleness_share_0"] == pytest.approx(1 / 3)
    assert found["rollout/staleness_share_over"] == found["rollout/stale_masked_fraction"] == pytest.approx(1 / 3)


def test_masking_again_changes_nothing_and_what_was_masked_stays_so():
    group = group_of([[3, 4, 5]])
    group.samples[0].loss_mask[2] = False
    policy = off_policy(stale_policy="mask_stale_tokens")
    assert [mask_old_tokens([group], policy, step=5) for _ in range(2)] == [1, 0]
    assert group.samples[0].loss_mask.tolist() == [False, True, False]


def test_a_batch_of_which_nothing_is_left_ends_the_run_and_says_which_keys_did_it():
    with pytest.raises(SamplingError, match=r"all 2 tokens .* max_staleness=1.*raise max_staleness"):
        mask_old_tokens([group_of([[0, 1]])], off_policy(stale_policy="mask_stale_tokens"), step=5)


def test_a_token_older_than_the_weights_that_its_group_was_started_with_names_the_weight_update():
    require_started_version(group_of([[4, 5]], started=4))
    with pytest.raises(SamplingError, match=r"version 3, but the group was started with version 4; did the weight upd"):
        require_started_version(group_of([[4, 4], [3]], started=4))


def test_a_token_of_weights_that_do_not_exist_yet_is_refused():
    require_published_versions([group_of([[4, 5]])], step=5)
    with pytest.raises(SamplingError, match=r"s000000005-000\. was sampled by weight version 6, but 5 is the newest"):
        require_published_versions([group_of([[5, 6]])], step=5)
