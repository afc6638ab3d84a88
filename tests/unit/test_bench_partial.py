"""The statistics of the benchmark of partial rollouts: what it draws, and which differences its test finds."""

from __future__ import annotations

import numpy as np
import pytest

from tools.bench_partial import CONTEXT, PROMPT, Lengths, kolmogorov_smirnov


def test_lengths_have_the_tail_that_was_asked_for_and_fit_the_context() -> None:
    drawn = Lengths(32, 8.0).draw(np.random.default_rng(1), 200_000)
    assert np.quantile(drawn, 0.5) == 32
    assert np.quantile(drawn, 0.99) == pytest.approx(8 * 32, rel=0.03)
    longest = Lengths(1000, 8.0).draw(np.random.default_rng(1), 10_000)
    assert (longest.min() >= 1, longest.max()) == (True, CONTEXT - PROMPT)


@pytest.mark.parametrize(("distance", "p"), [(0.0304, 0.30), (0.0428, 0.05), (0.0515, 0.01)])
def test_p_values_are_those_of_the_tables(distance: float, p: float) -> None:
    """Critical distances of two samples of 2,000: c(p) sqrt(2 / 2000), with c = 0.973 (interpolated), 1.358, 1.628."""
    ladder = np.arange(2000)
    found, value = kolmogorov_smirnov(ladder, ladder + round(distance * 2000))
    assert found == pytest.approx(distance, abs=5e-4)
    assert value == pytest.approx(p, rel=0.06)


def test_one_distribution_rarely_looks_like_two_and_a_shift_of_a_fifth_never_like_one() -> None:
    lengths, rng = Lengths(32, 8.0), np.random.default_rng(2)
    pairs = [(lengths.draw(rng, 2048), lengths.draw(rng, 2048)) for _ in range(200)]
    assert sum(kolmogorov_smirnov(*pair)[1] <= 0.01 for pair in pairs) <= 6
    assert all(kolmogorov_smirnov(one, np.ceil(0.8 * other))[1] <= 0.01 for one, other in pairs)
