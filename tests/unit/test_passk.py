"""Estimates from repeated samples and their intervals."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.evaluation import bootstrap_interval, pass_at_k, share_interval


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 2, 2, 5 / 6), (4, 0, 4, 0.0), (4, 4, 1, 1.0), (8, 3, 8, 1.0)],
)
def test_pass_at_k_worked_examples(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected)


@settings(deadline=None)
@given(st.data(), st.integers(1, 200))
def test_pass_at_k_equals_the_ratio_of_exact_binomials(data, n):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    assert pass_at_k(n, c, k) == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k), abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(k):
    right = [True, False, False, True, False]
    subsets = list(itertools.combinations(right, k))
    assert pass_at_k(5, 2, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_does_not_overflow():
    assert pass_at_k(100_000, 10, 5_000) == pytest.approx(1 - 0.95**10, rel=1e-3)


def test_bootstrap_interval_is_reproducible_and_holds_the_mean():
    values = np.random.default_rng(0).random(80)
    low, high = bootstrap_interval(values, seed=1)
    assert (low, high) == bootstrap_interval(values, seed=1)
    assert (low, high) != bootstrap_interval(values, seed=2)
    assert low < values.mean() < high


def test_bootstrap_interval_has_about_the_width_of_the_normal_one():
    values = np.random.default_rng(0).random(200)
    low, high = bootstrap_interval(values, seed=0)
    assert high - low == pytest.approx(2 * 1.96 * values.std(ddof=1) / math.sqrt(200), rel=0.1)


@settings(deadline=None, max_examples=20)
@given(st.floats(0, 1), st.integers(1, 30))
def test_bootstrap_interval_of_equal_values_is_that_value(value, n):
    assert bootstrap_interval([value] * n, seed=0) == (pytest.approx(value), pytest.approx(value))


@pytest.mark.parametrize("n", [1, 8, 512])
def test_an_interval_does_not_claim_certainty_where_all_prompts_agree(n):
    low, high = share_interval([0.0] * n, seed=0)
    assert low == 0
    # Wilson's interval at 0 of n ends at z^2 / (n + z^2), about 3.84 / (n + 3.84).
    assert high == pytest.approx(3.8415 / (n + 3.8415), rel=1e-3)
    assert share_interval([1.0] * n, seed=0) == (pytest.approx(1 - high), 1.0)


def test_the_interval_of_differing_prompts_is_the_bootstrap():
    assert share_interval([0.0, 1.0, 0.5], seed=3) == bootstrap_interval([0.0, 1.0, 0.5], seed=3)
