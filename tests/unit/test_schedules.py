"""The learning rate over a run."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.schedules import learning_rate

SCHEDULES = ("constant", "linear", "cosine")


def over_a_run(total, **options):
    return [learning_rate(step, total_steps=total, **options) for step in range(total)]


def test_constant_after_the_warm_up():
    assert over_a_run(6, lr=1.0, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_ends_at_the_minimum_on_the_last_update():
    found = over_a_run(7, lr=1.0, min_lr=0.2, schedule="linear", warmup_steps=2)
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_halfway_in_the_middle():
    found = over_a_run(5, lr=1.0, schedule="cosine")
    assert found == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)


@settings(deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(1, 60), st.integers(0, 70), st.floats(1e-8, 1.0), st.floats(0.0, 1.0))
def test_it_rises_during_the_warm_up_falls_after_it_and_stays_in_bounds(schedule, total, warmup, lr, share):
    options = {"lr": lr, "min_lr": lr * share, "schedule": schedule, "warmup_steps": warmup, "total_steps": total}
    found = [learning_rate(step, **options) for step in [*range(max(total, warmup) + 5), 10_000]]
    rising, falling = found[:warmup], found[warmup:]
    assert all(0 < a < b for a, b in itertools.pairwise(rising))
    assert all(a >= b for a, b in itertools.pairwise(falling))
    assert max(found) <= lr * (1 + 1e-12)
    assert min(falling, default=lr) >= lr * share * (1 - 1e-12)


def test_a_run_of_one_step_has_the_peak():
    assert [over_a_run(1, lr=0.5, schedule=s) for s in SCHEDULES] == [[0.5]] * 3
