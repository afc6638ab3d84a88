"""Weights of the loss come from global counts and add up to what their name says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.normalisation import NORMALISATIONS, token_weights

LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=20)
PROPERTY = settings(max_examples=80, deadline=None)


def test_worked_examples():
    n = [2, 0, 6]
    np.testing.assert_allclose(token_weights("token_mean", n), [1 / 8, 0, 1 / 8])
    np.testing.assert_allclose(token_weights("seq_mean_token_mean", n), [1 / 4, 0, 1 / 12])
    np.testing.assert_allclose(token_weights("constant", n, constant=10), [1 / 20, 0, 1 / 20])


@pytest.mark.parametrize("normalisation", ["token_mean", "seq_mean_token_mean"])
@given(n=LENGTHS)
@PROPERTY
def test_weights_of_all_tokens_add_up_to_one(normalisation, n):
    total = (token_weights(normalisation, n) * np.asarray(n)).sum()
    assert total == pytest.approx(1.0 if any(n) else 0.0)


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@given(n=LENGTHS, masked=st.integers(1, 5))
@PROPERTY
def test_fully_masked_sequences_change_no_weight(normalisation, n, masked):
    alone = token_weights(normalisation, n, constant=64)
    padded = token_weights(normalisation, n + [0] * masked, constant=64)
    np.testing.assert_array_equal(padded, np.concatenate([alone, np.zeros(masked)]))


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_an_all_masked_batch_has_weight_zero(normalisation):
    np.testing.assert_array_equal(token_weights(normalisation, [0, 0, 0], constant=5), [0.0, 0.0, 0.0])
