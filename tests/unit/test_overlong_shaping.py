"""Overlong responses are punished or left out, and uniform groups are recognised."""

import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.dynamic import is_informative
from megatron_rl.algorithms.shaping import overlong_penalty


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0), (500, -1.0)],
)
def test_the_soft_punishment_falls_linearly_over_the_cache(length, expected):
    assert overlong_penalty(length, max_length=100, cache=20) == pytest.approx(expected)


def test_the_soft_punishment_scales():
    assert overlong_penalty(95, max_length=100, cache=10, scale=0.5) == pytest.approx(-0.25)


@settings(deadline=None)
@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(0, 5000), st.floats(0.1, 2))
def test_the_punishment_is_never_positive_and_grows_with_length(cache, extra, length, scale):
    limit = cache + extra
    here, longer = (overlong_penalty(n, limit, cache, scale) for n in (length, length + 1))
    assert -scale <= longer <= here <= 0


@pytest.mark.parametrize(
    ("correctness", "expected"),
    [
        ([1, 0, 0], True),
        ([1, 1, 1], False),
        ([0.5, 0.5 + 1e-7], False),
        ([0.5, 0.5 + 1e-5], True),
        ([1, math.nan, 1], False),
        ([1, math.nan, 0], True),
        ([1], False),
        ([], False),
    ],
)
def test_a_group_is_informative_when_its_correctness_varies(correctness, expected):
    assert is_informative(correctness) is expected


def test_what_the_rollout_controller_uses_never_imports_torch():
    modules = "shaping, dynamic, evaluation, schedules, spec, advantages, normalisation"
    code = f"import sys; from megatron_rl.algorithms import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
