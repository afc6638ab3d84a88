"""Settings of partial rollouts and asynchrony: what follows from a mode, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl.config import Config, ConfigError, dump, load_config
from megatron_rl.config.checks import _off_policy
from tests.least import least


def config(algorithm: dict[str, Any] | None = None, **rollout: Any) -> Config:
    return least(algorithm=algorithm or {}, rollout=rollout)


@pytest.mark.parametrize(
    ("rollout", "staleness", "corrections"),
    [
        ({}, 0, []),
        ({"mode": "sync"}, 0, []),
        ({"partial_rollouts": True}, 2, ["tis"]),
        ({"mode": "one_step_off"}, 2, ["tis"]),
        ({"mode": "async", "max_staleness": 4}, 4, ["tis"]),
    ],
)
def test_a_mode_brings_its_staleness_and_its_correction(rollout, staleness, corrections):
    cfg = config(**rollout)
    assert (cfg.rollout.max_staleness, cfg.algorithm.corrections) == (staleness, corrections)


def test_corrections_of_the_user_win_and_the_engines_own_log_probs_need_none():
    assert config({"corrections": ["icepop"]}, mode="async").algorithm.corrections == ["icepop"]
    assert config({"old_logprobs": "rollout"}, mode="async").algorithm.corrections == []


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"max_staleness": 2}, "max_staleness=2: mode=sync trains on tokens of the newest weights only; leave it out"),
        ({"mode": "async", "max_staleness": 0}, "max_staleness=0: mode=async needs tokens of older weights; use 1"),
        ({"stale_policy": "mask_stale_tokens"}, "stale_policy=mask_stale_tokens has no effect with mode=sync"),
        (
            {"mode": "one_step_off", "mask_off_policy_tokens": True},
            "mask_off_policy_tokens=true with mode=one_step_off",
        ),
        (
            {"mode": "async", "mask_off_policy_tokens": True},
            "mask_off_policy_tokens=true with mode=async",
        ),
        ({"mode": "fast"}, "rollout.mode"),
    ],
)
def test_what_cannot_be_meant_is_refused(rollout, message):
    with pytest.raises(ConfigError, match=message):
        config(**rollout)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_turns", 4),
        ("max_turn_tokens", 9),
        ("environment_timeout_s", 5.0),
        ("environment_workers", 3),
        ("environment_args", {"a": 1}),
    ],
)
def test_a_key_of_environments_is_refused_without_one_unless_it_says_the_default(key, value):
    fix = "set environment=module:Class, or leave it out"
    with pytest.raises(ConfigError, match=rf"{key}={value} without environment: there is one turn, .*; {fix}"):
        config(**{key: value})
    assert getattr(config(environment="a:B", **{key: value}).rollout, key) == value
    resolved = config().rollout.model_dump()
    assert config(**resolved).rollout.model_dump() == resolved


@pytest.mark.parametrize("rollout", [{}, {"partial_rollouts": True}, {"mode": "one_step_off"}])
def test_requests_can_be_kept_through_updates_only_where_some_run(rollout):
    def complaints(**settings: Any) -> list[str]:
        cfg = config(**settings)
        return list(_off_policy(cfg.model_copy(update={"engine": cfg.engine.model_copy(update=kept)})))

    kept = {"pause_mode": "in_place"}
    (found,) = complaints(**rollout)
    mode = rollout.get("mode", "sync")
    assert found == (
        f"engine.pause_mode=in_place with rollout.mode={mode}: no request runs during an update; leave it out, or use "
        "rollout.mode=async"
    )
    assert complaints(mode="async") == []


@pytest.mark.parametrize("name", ["guessing.HigherOrLower", "guessing:", "a:b:c"])
def test_an_environment_is_named_by_module_and_class(name):
    with pytest.raises(ConfigError, match=rf"environment='{name}' should be module:Class, such as"):
        config(environment=name)


def test_no_arguments_take_away_those_of_the_file_and_others_are_added(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(dump(config(environment="m:C", environment_args={"a": 1, "b": 2})))
    assert load_config(file, ["rollout.environment_args={}"]).rollout.environment_args == {}
    assert load_config(file, ["rollout.environment_args={a: 3}"]).rollout.environment_args == {"a": 3, "b": 2}
