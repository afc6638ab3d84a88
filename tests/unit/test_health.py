"""Health rules are silent on healthy runs, speak once when a trend lasts, and say what to do."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import Any

import pytest

from megatron_rl.config import Config
from megatron_rl.monitor.clip_rules import LIMITS, clip_rules
from megatron_rl.monitor.health import HealthMonitor
from megatron_rl.monitor.health_rules import RULES
from tests.synthetic_run import skill_at, step_row


def observe(rows: Iterable[dict[str, float | None]], **options: Any) -> list[tuple[int, str]]:
    monitor = HealthMonitor(**options)
    return [(step, line) for step, row in enumerate(rows, start=1) for line in monitor.observe(step, row)]


def constant_then(metric: str, start: float, later: float, steps: int = 60) -> list[dict[str, float | None]]:
    return [{metric: start if step < 15 else later} for step in range(steps)]


@pytest.mark.parametrize("seed", range(8))
def test_a_healthy_run_is_silent(seed: int) -> None:
    rng = random.Random(seed)
    rows = [step_row(step, skill_at(step, 60), rng) for step in range(1, 61)]
    assert observe(rows, updates_per_batch=2) == []


def test_a_collapse_is_told_once_per_rule_soon_after_it_begins() -> None:
    rng = random.Random(0)
    rows = [step_row(step, skill_at(step, 80), rng, collapse=step > 40) for step in range(1, 81)]
    lines = observe(rows)
    names = [line.split(":", 1)[0] for _, line in lines]
    assert sorted(names) == ["WARNING entropy collapse", "WARNING reward fall"]
    assert all(40 < step <= 60 for step, _ in lines)


@pytest.mark.parametrize(
    ("metric", "start", "later", "rule"),
    [
        ("policy/entropy", 0.5, 0.02, "entropy collapse"),
        ("policy/entropy", 0.6, 2.5, "entropy growth"),
        ("rollout/truncated_fraction", 0.02, 0.6, "response length at the limit"),
        ("rollout/response_length_mean", 200.0, 20.0, "response length collapse"),
        ("reward/mean", 0.8, 0.2, "reward fall"),
        ("optimizer/grad_norm", 0.3, 9.0, "gradient norm growth"),
        ("gap/mean_abs", 0.008, 0.2, "trainer-engine gap growth"),
        ("rollout/groups_dropped_fraction", 0.2, 0.95, "groups without a signal"),
        ("policy/kl_reference", 0.01, 1.5, "KL to the reference"),
        ("policy/clip_fraction", 0.1, 0.5, "clip fraction growth"),
        ("gap/ess", 0.99, 0.3, "few effective samples"),
        ("rollout/stale_dropped_fraction", 0.0, 0.5, "groups dropped for age"),
        ("rollout/staleness_mean", 0.6, 2.4, "tokens grow older"),
        ("routing/mismatch_engine", 0.04, 0.2, "routing mismatch grows"),
        ("routing/dead_experts", 0.0, 0.3, "experts die"),
    ],
)
def test_each_trend_warns_once(metric: str, start: float, later: float, rule: str) -> None:
    lines = [line for _, line in observe(constant_then(metric, start, later), updates_per_batch=4)]
    assert [line.split(":", 1)[0] for line in lines if line.startswith("WARNING")] == [f"WARNING {rule}"]
    # The other way round is either healthy or another rule's business.
    back = [line for _, line in observe(constant_then(metric, later, start), updates_per_batch=4)]
    assert not any(line.startswith(f"WARNING {rule}:") for line in back)


@pytest.mark.parametrize("start", [0.0, 0.2])
def test_missing_routes_warn_also_from_the_start(start: float) -> None:
    lines = [line for _, line in observe(constant_then("routing/live_share", start, 0.2), updates_per_batch=4)]
    assert [line.split(":", 1)[0] for line in lines] == ["WARNING routes are missing"]


def test_a_value_that_was_out_of_its_band_from_the_start_only_informs() -> None:
    for metric, value in (
        ("gap/mean_abs", 0.2),
        ("policy/clip_fraction", 0.5),
        ("rollout/groups_dropped_fraction", 0.9),
        ("rollout/stale_dropped_fraction", 0.5),
    ):
        levels = [
            line.split(" ", 1)[0] for _, line in observe(constant_then(metric, value, value), updates_per_batch=2)
        ]
        assert levels == ["INFO"]


def test_values_that_flicker_around_a_threshold_speak_at_most_once() -> None:
    rng = random.Random(1)
    flicker: list[dict[str, float | None]] = [{"policy/clip_fraction": 0.1} for _ in range(12)]
    flicker += [{"policy/clip_fraction": 0.3 + rng.uniform(-0.1, 0.1)} for _ in range(300)]
    assert len(observe(flicker, updates_per_batch=2)) <= 1


def test_the_end_of_a_trend_is_told_and_a_relapse_warns_again() -> None:
    rows = [*constant_then("gap/mean_abs", 0.008, 0.2), *constant_then("gap/mean_abs", 0.008, 0.2)[:14] * 3]
    lines = [line.split(":", 1)[0] for _, line in observe([*rows, *constant_then("gap/mean_abs", 0.2, 0.2)])]
    assert lines.count("WARNING trainer-engine gap growth") == 2
    assert "INFO trainer-engine gap growth" in lines


def test_one_bad_step_is_no_trend() -> None:
    rows: list[dict[str, float | None]] = [{"reward/mean": 0.5, "gap/mean_abs": 0.005} for _ in range(40)]
    rows[25] = {"reward/mean": 0.2, "gap/mean_abs": 0.02}
    assert observe(rows) == []


@pytest.mark.parametrize("start", [0.008, 0.2])
def test_the_gap_is_not_judged_where_the_age_of_tokens_is_in_it(start: float) -> None:
    rows = constant_then("gap/mean_abs", start, 0.3)
    assert observe(rows)
    assert observe([row | {"rollout/staleness_mean": 1.0} for row in rows]) == []


def test_a_gradient_spike_informs_with_its_step() -> None:
    rows: list[dict[str, float | None]] = [{"optimizer/grad_norm": 0.4} for _ in range(30)]
    rows[24] = {"optimizer/grad_norm": 50.0}
    assert (25, "INFO gradient spike: step 25 had a gradient norm of 50, 0.4 is usual lately") in observe(rows)


def test_low_entropy_and_dropped_groups_are_the_natural_end_of_a_solved_task() -> None:
    rows: list[dict[str, float | None]] = []
    for step in range(80):
        done = step >= 20
        row = {"policy/entropy": 0.01 if done else 0.6, "rollout/groups_dropped_fraction": 0.95 if done else 0.2}
        rows.append(row | {"reward/correctness": 0.5, "eval/pass_at_1": 0.97 if done else 0.1})
    assert observe(rows) == []


def test_clipping_is_not_judged_with_one_update_per_batch() -> None:
    assert observe(constant_then("policy/clip_fraction", 0.1, 0.9), updates_per_batch=1) == []


@pytest.mark.parametrize(
    ("loss", "share", "speaks"),
    [("ppo", 0.4, True), ("gspo", 0.4, False), ("gspo", 0.6, True), ("cispo", 0.15, True), ("sapo", 0.9, False)],
)
def test_each_loss_has_its_own_threshold_of_clipping(loss: str, share: float, speaks: bool) -> None:
    lines = observe(constant_then("policy/clip_fraction", 0.01, share), updates_per_batch=2, loss=loss)
    assert [line.split(":")[0] for _, line in lines] == ["WARNING clip fraction growth"] * speaks


@pytest.mark.parametrize(("side", "share"), [("above", 0.06), ("below", 0.12)])
def test_many_ratios_beyond_a_bound_suggest_to_widen_it(side: str, share: float) -> None:
    lines = observe(constant_then(f"policy/ratio_{side}_fraction", 0.01, share), updates_per_batch=2)
    assert [line.split(" clip:")[0] for _, line in lines] == [f"INFO narrow {'upper' if side == 'above' else 'lower'}"]


def test_missing_and_non_finite_values_are_not_measurements() -> None:
    assert observe([{}, {"policy/entropy": None}, {"reward/mean": None}] * 30) == []


def test_every_key_that_a_message_names_exists_in_the_configuration() -> None:
    for rule in (*RULES, *(rule for loss in LIMITS for rule in clip_rules(loss))):
        for section, key in re.findall(r"\b(algorithm|optimizer|rollout|engine|model|data)\.(\w+)", rule.message):
            assert key in Config.model_fields[section].annotation.model_fields, f"{rule.name}: {section}.{key}"


def test_a_step_that_trains_on_nothing_is_told_at_once_and_once() -> None:
    rows: list[dict[str, float | None]] = [{"policy/tokens": n} for n in (9.0, 0.0, 0.0, 5.0, 0.0)]
    lines = observe(rows)
    assert [step for step, _ in lines] == [2, 5]
    assert all("WARNING nothing trained: no token of step" in line for _, line in lines)
