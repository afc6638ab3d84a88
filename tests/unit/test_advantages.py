"""Rewards of groups become advantages: worked examples, invariances, and what is left out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.advantages import WITHIN_GROUP, compute_advantages, usable_samples, whiten
from megatron_rl.algorithms.spec import AdvantageSpec

PROPERTY = settings(max_examples=60, deadline=None)
COMPARING = [kind for kind in WITHIN_GROUP if kind != "reinforce_pp"]


def advantages(rewards, groups, spec, lengths=None, valid=None):
    n = len(rewards)
    return compute_advantages(
        rewards,
        groups,
        np.ones(n, int) if lengths is None else lengths,
        np.ones(n, bool) if valid is None else valid,
        spec,
    )


def random_batch(seed, groups=4, size=5):
    rng = np.random.default_rng(seed)
    return rng.normal(size=groups * size), np.repeat(np.arange(groups), size), rng.integers(1, 50, groups * size)


@pytest.mark.parametrize(
    ("rewards", "kind", "std", "expected"),
    [
        ((1, 0, 0, 1), "grpo", "population", (1, -1, -1, 1)),
        ((1, 0, 0, 0), "grpo", "population", (1.7320508, -0.5773503, -0.5773503, -0.5773503)),
        ((1, 0, 0, 0), "grpo", "sample", (1.5, -0.5, -0.5, -0.5)),
        ((1, 0, 0, 0), "grpo", "none", (0.75, -0.25, -0.25, -0.25)),
        ((1, 0, 0, 0), "dr_grpo", "none", (0.75, -0.25, -0.25, -0.25)),
        ((1, 0, 0, 0), "rloo", "population", (1, -1 / 3, -1 / 3, -1 / 3)),
    ],
)
def test_worked_examples(rewards, kind, std, expected):
    found = advantages(rewards, [7] * 4, AdvantageSpec(kind, std))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_grpo_offsets_the_standard_deviation_by_1e_6():
    found = advantages([0.0, 2e-6], [0, 0], AdvantageSpec("grpo"))
    np.testing.assert_allclose(found, [-0.5, 0.5], rtol=1e-12)


@pytest.mark.parametrize("kind", WITHIN_GROUP)
@given(seed=st.integers(0, 2**32 - 1))
@PROPERTY
def test_permuting_samples_permutes_advantages(kind, seed):
    rewards, groups, lengths = random_batch(seed)
    order = np.random.default_rng(seed).permutation(len(rewards))
    spec = AdvantageSpec(kind)
    here = advantages(rewards, groups, spec, lengths)[order]
    there = advantages(rewards[order], groups[order], spec, lengths[order])
    np.testing.assert_allclose(there, here, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", COMPARING)
@given(seed=st.integers(0, 2**32 - 1), shift=st.floats(-100, 100))
@PROPERTY
def test_adding_a_constant_to_a_group_changes_nothing(kind, seed, shift):
    rewards, groups, lengths = random_batch(seed)
    spec = AdvantageSpec(kind)
    moved = rewards + np.where(groups == 1, shift, 0.0)
    np.testing.assert_allclose(
        advantages(moved, groups, spec, lengths), advantages(rewards, groups, spec, lengths), atol=1e-9
    )


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@given(seed=st.integers(0, 2**32 - 1))
@PROPERTY
def test_a_group_does_not_see_other_groups_and_sums_to_zero(kind, seed):
    rewards, groups, _ = random_batch(seed)
    spec, mine = AdvantageSpec(kind), groups == 2
    all_groups = advantages(rewards, groups, spec)
    np.testing.assert_array_equal(all_groups[mine], advantages(rewards[mine], groups[mine], spec))
    assert abs(all_groups[mine].sum()) < 1e-12


@given(seed=st.integers(0, 2**32 - 1))
@PROPERTY
def test_rloo_is_dr_grpo_times_n_over_n_minus_1(seed):
    rewards, groups, _ = random_batch(seed, size=6)
    np.testing.assert_allclose(
        advantages(rewards, groups, AdvantageSpec("rloo")),
        advantages(rewards, groups, AdvantageSpec("dr_grpo")) * 6 / 5,
        atol=1e-12,
    )


def test_groups_are_keyed_by_id_wherever_their_members_stand():
    spec = AdvantageSpec("dr_grpo")
    found = advantages([1.0, 5.0, 0.0, 7.0], ["b", "a", "b", "a"], spec)
    np.testing.assert_array_equal(found, [0.5, -1.0, -0.5, 1.0])


@pytest.mark.parametrize("kind", WITHIN_GROUP)
def test_a_uniform_group_gets_zero_and_leaves_the_others_alone(kind):
    spec, lengths = AdvantageSpec(kind), [3, 4, 5, 6]
    alone = advantages([1.0, 0.0], [0, 0], spec, lengths[:2])
    both = advantages([1.0, 0.0, 3.0, 3.0 + 1e-7], [0, 0, 1, 1], spec, lengths)
    np.testing.assert_array_equal(both, [*alone, 0.0, 0.0])
    assert np.all(alone != 0)


@pytest.mark.parametrize("kind", WITHIN_GROUP)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_reward_leaves_its_group_and_gets_zero(kind, bad):
    spec = AdvantageSpec(kind)
    without = advantages([1.0, 0.0, 0.5], [0, 0, 0], spec, [2, 3, 4])
    found = advantages([1.0, bad, 0.0, 0.5], [0, 0, 0, 0], spec, [2, 9, 3, 4])
    np.testing.assert_allclose(found, [without[0], 0.0, without[1], without[2]], rtol=1e-12)
    np.testing.assert_array_equal(usable_samples([1.0, bad, 0.0, 0.5], np.ones(4, bool)), [True, False, True, True])


def test_a_sample_without_a_reward_is_treated_like_a_non_finite_one():
    spec = AdvantageSpec("grpo")
    found = advantages([1.0, 50.0, 0.0], [0, 0, 0], spec, valid=[True, False, True])
    np.testing.assert_allclose(found, [1.0, 0.0, -1.0], atol=1e-5)


def test_a_masked_sample_stays_in_the_statistics_of_its_group():
    found = advantages([1.0, 0.0, 0.0, 0.0], [0] * 4, AdvantageSpec("dr_grpo"), lengths=[0, 5, 5, 5])
    np.testing.assert_array_equal(found, [0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("kind", COMPARING)
def test_a_group_that_failures_leave_with_one_member_gets_zero(kind):
    found = advantages([1.0, np.nan, 1.0, 0.0], [0, 0, 1, 1], AdvantageSpec(kind))
    assert found[0] == found[1] == 0
    assert np.all(found[2:] != 0)


@given(seed=st.integers(0, 2**32 - 1))
@PROPERTY
def test_reinforce_pp_whitens_over_tokens_not_samples(seed):
    rewards, _, lengths = random_batch(seed)
    found = advantages(rewards, np.arange(len(rewards)), AdvantageSpec("reinforce_pp"), lengths)
    tokens, raw = np.repeat(found, lengths), np.repeat(rewards, lengths)
    np.testing.assert_allclose(tokens, (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8), atol=1e-9)


@given(seed=st.integers(0, 2**32 - 1))
@PROPERTY
def test_reinforce_pp_baseline_whitens_what_is_left_of_the_group_mean(seed):
    rewards, groups, lengths = random_batch(seed)
    found = advantages(rewards, groups, AdvantageSpec("reinforce_pp_baseline"), lengths)
    raw = np.repeat(advantages(rewards, groups, AdvantageSpec("dr_grpo")), lengths)
    expected = (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.repeat(found, lengths), expected, atol=1e-9)


def test_whitening_without_shift_only_divides():
    values, counts = np.array([1.0, 2.0, 4.0]), np.array([1.0, 1.0, 1.0])
    np.testing.assert_allclose(whiten(values, counts, shift_mean=False), values / np.std(values, ddof=1), rtol=1e-7)


@pytest.mark.parametrize("counts", [[0, 0], [1, 0]])
def test_whitening_fewer_than_two_tokens_gives_zero(counts):
    np.testing.assert_array_equal(whiten(np.array([1.0, 5.0]), np.array(counts, float)), [0.0, 0.0])


def test_an_empty_batch_has_no_advantages():
    assert advantages([], [], AdvantageSpec("grpo")).shape == (0,)
