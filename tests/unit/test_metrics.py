"""Collecting the metrics of a step, timing its phases, and the table that explains every name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from megatron_rl.monitor.clip_rules import clip_rules
from megatron_rl.monitor.health_rules import RULES
from megatron_rl.monitor.metric_names import METRICS, describe, undocumented
from megatron_rl.monitor.metrics import PhaseTimer, StepMetrics
from megatron_rl.monitor.report_catalogue import CHARTS


def test_values_of_any_number_type_become_plain_floats_in_order() -> None:
    metrics = StepMetrics()
    metrics.put("a/int", 3)
    metrics.put("a/bool", True)
    metrics.merge({"mean": np.float32(0.5), "max": np.int64(7)}, prefix="b/")
    values = metrics.as_dict()
    assert values == {"a/int": 3.0, "a/bool": 1.0, "b/mean": 0.5, "b/max": 7.0}
    assert list(values) == ["a/int", "a/bool", "b/mean", "b/max"]
    assert {type(value) for value in values.values()} == {float}


def test_a_second_value_under_the_same_name_is_refused_by_name() -> None:
    metrics = StepMetrics()
    metrics.put("policy/loss", 1.0)
    with pytest.raises(ValueError, match=r"'policy/loss' was put twice"):
        metrics.merge({"loss": 2.0}, prefix="policy/")
    assert metrics.as_dict() == {"policy/loss": 1.0}


@pytest.mark.parametrize("name", ["loss", "a b/c", "a/", "/a", "a/b\n", "step"])
def test_names_that_a_writer_cannot_carry_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not of the form group/name"):
        StepMetrics().put(name, 1.0)


def test_values_that_are_not_finite_become_none_and_are_counted() -> None:
    metrics = StepMetrics()
    metrics.merge({"a/nan": float("nan"), "a/inf": float("-inf"), "a/none": None, "a/fine": 0.0})
    assert metrics.as_dict() == {
        "a/nan": None,
        "a/inf": None,
        "a/none": None,
        "a/fine": 0.0,
        "system/non_finite_metrics": 3.0,
    }


class Clock:
    """A clock that stands still until it is told to advance."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_are_disjoint_shares_of_the_step() -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    clock.now += 1  # outside all phases
    with timer.phase("generate"):
        clock.now += 2
        with timer.phase("pull"):
            clock.now += 4
        clock.now += 8
    with timer.phase("train"):
        clock.now += 16
    with timer.phase("train"):
        clock.now += 32
    assert timer.metrics() == {"time/step": 63, "time/generate": 10, "time/pull": 4, "time/train": 48}


def test_a_phase_that_fails_is_still_booked_and_later_ones_are_not_mixed_up() -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)

    def fail_after_three_seconds() -> None:
        with timer.phase("train"):
            clock.now += 3
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_after_three_seconds()
    clock.now += 5
    assert timer.metrics() == {"time/step": 8, "time/train": 3}


def test_the_running_phase_is_announced_also_when_it_is_returned_to() -> None:
    seen: list[str] = []
    timer = PhaseTimer(seen.append)
    with timer.phase("generate"), timer.phase("pull"):
        pass
    assert seen == ["generate", "pull", "generate"]


def _names_used_elsewhere() -> Iterator[str]:
    yield from (rule.metric for rule in (*RULES, *clip_rules("ppo")))
    for chart in CHARTS:
        for line in chart.lines if not callable(chart.lines) else ():
            yield from (line.metric, *(line.band or ()))


def test_rules_and_charts_only_use_documented_metrics() -> None:
    assert undocumented(_names_used_elsewhere()) == []


def test_names_are_explained_exactly_before_by_pattern_and_unknown_ones_are_reported() -> None:
    assert len({info.name for info in METRICS}) == len(METRICS)
    assert all(info.meaning and info.unit and info.denominator for info in METRICS)
    exact, pattern = describe("eval/pass_at_1"), describe("eval/pass_at_16")
    assert exact is not None
    assert exact.name == "eval/pass_at_1"
    assert pattern is not None
    assert pattern.name == "eval/pass_at_<k>"
    assert undocumented(["step", "time", "eval/pass_at_x", "policy/made_up", "reward/countdown"]) == [
        "eval/pass_at_x",
        "policy/made_up",
    ]


def test_no_part_of_the_room_imports_torch_and_metrics_imports_nothing_of_ours() -> None:
    script = """
import sys
import megatron_rl.monitor.metrics, megatron_rl.monitor.metric_names
ours = sorted(m for m in sys.modules if m.startswith("megatron_rl"))
expected = ["megatron_rl", "megatron_rl.monitor", "megatron_rl.monitor.metric_names", "megatron_rl.monitor.metrics"]
assert ours == expected, ours
import megatron_rl.monitor.writers, megatron_rl.monitor.report, megatron_rl.monitor.progress, megatron_rl.monitor.logs
import tensorboard.summary.writer.event_file_writer
heavy = {"torch", "tensorflow", "megatron", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
