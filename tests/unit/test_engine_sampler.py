"""Sampling as array code: what is drawn, with which log-prob, from which random numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.engines.embedded.sampler import SamplingBatch, derive_seed, sample, uniforms

VOCAB = 37


def rows(
    count: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = VOCAB, min_p: float = 0.0
) -> SamplingBatch:
    return SamplingBatch(
        np.full(count, temperature, np.float32),
        np.full(count, top_p, np.float32),
        np.full(count, top_k, np.int64),
        np.full(count, min_p, np.float32),
        np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15),  # wraps: all 64 bits are used
        np.arange(count, dtype=np.int64) % 11,
    )


def logits(count: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed))


def frequencies(row: torch.Tensor, count: int, **params: float) -> np.ndarray:
    tokens, _ = sample(row.expand(count, VOCAB), rows(count, **params))
    return np.bincount(tokens, minlength=VOCAB) / count


def test_uniform_numbers_fill_the_unit_interval_and_depend_on_seed_and_position_only() -> None:
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.int64))
    draws = uniforms(seeds.ravel(), positions.ravel())
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    assert len(np.unique(draws)) == len(draws)
    counts = np.histogram(draws, bins=50, range=(0, 1))[0]
    expected = len(draws) / 50
    assert (np.abs(counts - expected) < 6 * np.sqrt(expected)).all()
    # Neighbours in seed or position are unrelated.
    grid = draws.reshape(200, 200)
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.03
    assert uniforms(np.array([7], np.uint64), np.array([5])) == grid[5, 7]


def test_derived_seeds_are_distinct_and_the_first_is_the_given_one() -> None:
    assert derive_seed(42, 0) == 42
    assert len({derive_seed(seed, k) for seed in (0, 1, 42, 2**64 - 1) for k in range(100)}) == 400


def test_tokens_follow_the_tempered_distribution() -> None:
    row = logits(1)[0]
    for temperature in (0.6, 1.0, 1.7):
        found = frequencies(row, 40_000, temperature=temperature)
        expected = torch.softmax(row / temperature, -1).numpy()
        np.testing.assert_allclose(found, expected, atol=6 * np.sqrt(0.25 / 40_000))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 3}, 3),
        ({"top_p": 0.5}, 2),  # 0.4 + 0.3 passes one half; the mass before the second is 0.4
        ({"top_p": 0.41}, 2),
        ({"top_p": 0.39}, 1),
        ({"min_p": 0.5}, 3),  # 0.4, 0.3, 0.2 are at least half of 0.4
        ({"top_k": 2, "min_p": 0.5}, 2),
    ],
)
def test_filters_keep_the_most_probable_tokens_in_proportion(params: dict[str, float], kept: int) -> None:
    probs = np.zeros(VOCAB)
    probs[[5, 1, 9, 30, 2]] = [0.4, 0.3, 0.2, 0.06, 0.04]
    row = torch.from_numpy(np.log(np.maximum(probs, 1e-30))).float()
    found = frequencies(row, 20_000, **params)
    expected = np.zeros(VOCAB)
    order = [5, 1, 9, 30, 2][:kept]
    expected[order] = probs[order] / probs[order].sum()
    np.testing.assert_allclose(found, expected, atol=6 * np.sqrt(0.25 / 20_000))


def test_log_probs_are_of_the_full_tempered_distribution_whatever_is_filtered() -> None:
    batch = logits(64)
    for params in ({"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.6, "top_k": 5, "min_p": 0.05}):
        tokens, log_probs = sample(batch, rows(64, **params))
        expected = torch.log_softmax(batch / 0.7, -1).numpy()[np.arange(64), tokens]
        np.testing.assert_allclose(log_probs, expected, rtol=0, atol=1e-6)


def test_greedy_rows_take_the_maximum_with_log_probs_at_temperature_one() -> None:
    batch = logits(64)
    settings_ = rows(64, temperature=1.3)
    settings_.temperature[::2] = 0.0
    tokens, log_probs = sample(batch, settings_)
    np.testing.assert_array_equal(tokens[::2], batch[::2].argmax(-1).numpy())
    np.testing.assert_allclose(log_probs[::2], torch.log_softmax(batch[::2], -1).max(-1).values.numpy(), atol=1e-6)
    assert (tokens[1::2] != batch[1::2].argmax(-1).numpy()).any()


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(24)), st.integers(1, 24))
def test_a_row_is_drawn_alike_in_any_company(order: list[int], count: int) -> None:
    batch, all_rows = logits(24), rows(24, temperature=0.9)
    all_rows.top_p[::3], all_rows.top_k[::5], all_rows.temperature[::7] = 0.8, 4, 0.0
    tokens, log_probs = sample(batch, all_rows)
    chosen = np.array(order[:count])
    part = SamplingBatch(**{name: values[chosen] for name, values in vars(all_rows).items()})
    part_tokens, part_log_probs = sample(batch[torch.from_numpy(chosen)], part)
    np.testing.assert_array_equal(part_tokens, tokens[chosen])
    np.testing.assert_array_equal(part_log_probs, log_probs[chosen])


def test_a_token_without_probability_is_never_drawn() -> None:
    row = torch.full((VOCAB,), float("-inf"))
    row[[0, VOCAB - 1]] = 0.0
    found = frequencies(row, 4000)
    assert found[0] + found[-1] == 1.0
    assert 0.4 < found[0] < 0.6


def test_nan_logits_are_reported_by_the_log_prob_of_their_row_only() -> None:
    batch = logits(3)
    batch[1, 4] = float("nan")
    tokens, log_probs = sample(batch, rows(3))
    assert np.isfinite(log_probs).tolist() == [True, False, True]
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
