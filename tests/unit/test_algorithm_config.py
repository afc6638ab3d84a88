"""Section `algorithm:`: what each preset means, what is refused and with which words, and what a dry run shows."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from megatron_rl.algorithms.losses import LOSSES
from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.config import Config, ConfigError, dump, validate
from megatron_rl.config.algorithm import PRESETS, AlgorithmConfig
from megatron_rl.config.algorithm_rules import LOSS_ARGS
from megatron_rl.config.plan import algorithm_rows
from megatron_rl.monitor.clip_rules import LIMITS
from tests.least import least


def config(**algorithm: Any) -> Config:
    return least(algorithm=algorithm)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("dapo", ("ppo", "grpo", "token_mean", 0.2, 0.28, 0.0, "population")),
        ("grpo", ("ppo", "grpo", "seq_mean_token_mean", 0.2, 0.2, 0.04, "population")),
        ("dr_grpo", ("ppo", "dr_grpo", "constant", 0.2, 0.2, 0.0, "none")),
        ("gspo", ("gspo", "grpo", "seq_mean_token_mean", 3e-4, 4e-4, 0.0, "population")),
        ("cispo", ("cispo", "grpo", "token_mean", 1.0, 4.0, 0.0, "population")),
        ("rloo", ("ppo", "rloo", "seq_mean_token_mean", 0.2, 0.2, 0.0, "population")),
        ("reinforce_pp", ("ppo", "reinforce_pp", "token_mean", 0.2, 0.2, 0.0, "population")),
    ],
)
def test_each_preset_is_its_paper(preset: str, expected: tuple[Any, ...]) -> None:
    a = config(preset=preset).algorithm
    assert (a.loss, a.advantage, a.normalisation, a.eps_low, a.eps_high, a.kl_coef, a.std) == expected
    assert a.kl_estimator == "k3"
    assert config(preset=preset).rollout.dynamic_sampling == ("refill" if preset == "dapo" else "off")


@pytest.mark.parametrize(
    ("preset", "rollout", "cache"),
    [
        ("dapo", {"max_response_tokens": 20480}, 4096),
        ("dapo", {"max_response_tokens": 2}, 1),
        ("dapo", {}, 1638),
        ("dapo", {"overlong_cache": 7}, 7),
        ("dapo", {"overlong_cache": None}, None),
        ("dapo", {"overlong_filter": True}, None),
        ("grpo", {}, None),
    ],
)
def test_dapo_brings_its_overlong_punishment(preset: str, rollout: dict[str, Any], cache: int | None) -> None:
    cfg = least(algorithm={"preset": preset}, rollout=rollout)
    assert cfg.rollout.overlong_cache == cache


def test_every_preset_is_tested_and_every_loss_is_known_everywhere() -> None:
    assert set(PRESETS) == set(AlgorithmConfig.model_fields["preset"].annotation.__args__)
    assert set(LOSS_ARGS) | {"nll"} == set(LOSSES)
    assert set(LIMITS) == set(LOSS_ARGS)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"preset": "gsp"}, "algorithm.preset='gsp': .*; did you mean gspo?"),
    ({"normalisation": "token_means"}, "algorithm.normalisation='token_means': .*; did you mean token_mean?"),
    ({"corrections": ["tls"]}, "algorithm.corrections.0='tls': .*; did you mean tis?"),
    ({"loss": "gpso"}, "loss=gpso: use one of ppo, gspo, .*; did you mean gspo?"),
    ({"loss": "nll"}, "loss=nll: use one of"),
    ({"loss": "module:"}, "loss=module:: use one of .* or module:function"),
    ({"loss": "gspo", "normalisation": "token_mean"}, "normalisation=token_mean: loss=gspo .* use normalisation=seq_"),
    ({"preset": "gspo", "normalisation": "constant"}, "normalisation=constant: loss=gspo"),
    ({"loss": "gspo_token"}, "normalisation=token_mean: loss=gspo_token"),
    ({"loss": "gmpo"}, "normalisation=token_mean: loss=gmpo"),
    ({"preset": "gspo", "dual_clip": 3.0}, "dual_clip=3.0: .* no place in gspo; use null"),
    ({"preset": "cispo", "dual_clip": 3.0}, "dual_clip=3.0: .* no place in cispo; use null"),
    ({"loss_args": {"tau": 1.0}}, "loss_args.tau: loss=ppo takes no arguments"),
    ({"loss": "sapo", "loss_args": {"tau": 1.0}}, "loss_args.tau: loss=sapo takes tau_positive, tau_negative"),
    ({"loss": "opmd", "loss_args": {"tau": 0}}, "loss_args.tau=0: write a finite number greater than 0"),
    ({"loss": "opmd", "loss_args": {"tau": True}}, "loss_args.tau=True: write a finite number"),
    ({"loss": "opmd", "loss_args": {"tau": float("inf")}}, "loss_args.tau=inf: write a finite number"),
    ({"preset": "GRPO"}, "algorithm.preset='GRPO': .*; did you mean grpo?"),
    ({"corrections": ["tis"], "correction_bounds": [1.5, 2]}, r"correction_bounds=\[1.5, 2.0\]: .* 0 <= lower <= 1"),
    ({"eps_low": 1.2}, "algorithm.eps_low=1.2"),
    ({"eps_high": 28}, "algorithm.eps_high=28"),
    ({"eps_high": -0.1}, "algorithm.eps_high=-0.1"),
    ({"dual_clip": 1.0}, "algorithm.dual_clip=1.0"),
    ({"kl_coef": 0.1, "kl_estimator": "k1"}, "kl_estimator=k1: in a loss its expected gradient is zero; use k3"),
    ({"kl_place": "reward", "kl_coef": 0.1, "kl_estimator": "k3"}, "kl_estimator=k3: kl_place=reward subtracts k1"),
    ({"kl_place": "reward"}, "kl_place=reward with kl_coef=0 subtracts nothing"),
    ({"kl_place": "reward", "kl_coef": 0.1, "old_logprobs": "reuse"}, "use old_logprobs=recompute or rollout"),
    ({"old_logprobs": "reuse", "updates_per_batch": 2}, "updates_per_batch=2; use old_logprobs=recompute"),
    ({"corrections": ["tis", "mis"]}, r"corrections=\[tis, mis\]: use one of"),
    ({"corrections": ["tis", "tis"]}, r"corrections=\[tis, tis\]: use one of"),
    ({"corrections": "tis", "old_logprobs": "rollout"}, r"corrections=\[tis\] .* old_logprobs=rollout makes them"),
    ({"corrections": ["mis"], "old_logprobs": "rollout"}, r"corrections=\[mis\] .* use old_logprobs=recompute"),
    ({"corrections": ["seq_mis"]}, r"needs bounds .* such as seq_mis_bounds=\[0.99, 1.01\]"),
    ({"seq_mis_bounds": [0.9, 1.1]}, r"seq_mis_bounds=\[0.9, 1.1\] has no effect without"),
    ({"correction_bounds": [0.0, 2.0]}, r"correction_bounds=\[0.0, 2.0\] has no effect without tis"),
    ({"corrections": ["tis"], "correction_bounds": [2, 1]}, r"correction_bounds=\[2.0, 1.0\]: write \[lower, upper\]"),
    ({"corrections": ["seq_mis"], "seq_mis_bounds": [-1, 1]}, r"seq_mis_bounds=\[-1.0, 1.0\]: write"),
    ({"corrections": ["mis"], "correction_bounds": [1, 1]}, r"correction_bounds=\[1.0, 1.0\]: .* lower < upper"),
    ({"corrections": ["seq_mis"], "seq_mis_bounds": [1, 1]}, r"seq_mis_bounds=\[1.0, 1.0\]: .* lower < upper"),
    ({"corrections": 5}, "algorithm.corrections=5: input should be a valid list"),
    ({"corrections": True}, "algorithm.corrections=True: input should be a valid list"),
    ({"corrections": [["tis"]]}, r"algorithm.corrections.0=\['tis'\]: input should be"),
    (
        {"corrections": ["mis"], "renormalise_after_rejection": True, "old_logprobs": "reuse"},
        "old_logprobs=reuse knows it only afterwards",
    ),
    ({"ema_baseline": 0.1, "advantage": "rloo"}, "ema_baseline=0.1: it belongs to advantage=grpo, not rloo"),
    ({"ema_baseline": 1.0}, "algorithm.ema_baseline=1.0"),
]


@pytest.mark.parametrize(("algorithm", "message"), REFUSED)
def test_what_cannot_be_computed_is_refused_with_the_way_out(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**algorithm)


def test_all_problems_of_the_section_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"- algorithm: dual_clip=3.0.*\n  - algorithm: kl_estimator=k1"):
        config(preset="gspo", dual_clip=3.0, kl_estimator="k1")


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_resolved_section_means_the_same_when_it_is_read_again(preset: str) -> None:
    for extra in (
        {},
        {"kl_place": "reward", "kl_coef": 0.1},
        {"corrections": ["tis", "seq_mis"], "seq_mis_bounds": [0.9, 2]},
    ):
        first = config(preset=preset, **extra)
        assert validate(yaml.safe_load(dump(first))) == first


def test_a_kl_in_the_reward_is_k1_and_leaves_the_loss() -> None:
    algorithm = config(kl_place="reward", kl_coef=0.1).algorithm
    assert algorithm.kl_estimator == "k1"
    assert LossSpec.from_config(algorithm).kl_coef == 0


def test_corrections_reach_the_loss() -> None:
    both = config(corrections=["seq_mis", "icepop"], correction_bounds=[0.4, 4], seq_mis_bounds=[0.9, 1.1]).algorithm
    spec = LossSpec.from_config(both)
    assert (spec.correction, spec.token_bounds, spec.sequence_bounds) == ("icepop", (0.4, 4.0), (0.9, 1.1))
    assert spec.needs_behaviour
    assert spec.needs_sequences
    assert LossSpec.from_config(config(corrections="tis").algorithm).token_bounds == (0.0, 2.0)
    plain = LossSpec.from_config(config().algorithm)
    assert not plain.needs_behaviour
    assert not plain.needs_sequences


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_dry_run_shows_every_resolved_value_and_where_it_comes_from(preset: str) -> None:
    rows = {key: (value, source) for key, value, source in algorithm_rows(config(preset=preset, shift_mean=True))}
    a = config(preset=preset).algorithm
    assert rows["preset"] == (preset, "")
    assert rows["eps_high"] == (f"{a.eps_high:g}", "preset")
    assert rows["loss"] == (a.loss, "preset")
    assert rows["dual_clip"] == ("null", "default")
    assert rows["shift_mean"] == ("true", "default")
    shown = set(rows) | {"updates_per_batch", "max_tokens_per_microbatch"}
    assert shown == set(AlgorithmConfig.model_fields) | {"rollout.dynamic_sampling", "rollout.overlong_cache"}


def test_a_dry_run_names_what_was_changed_against_the_preset() -> None:
    cfg = config(preset="gspo", eps_high=0.01, std="none", corrections="tis")
    rows = {key: (value, source) for key, value, source in algorithm_rows(cfg)}
    assert rows["corrections"] == ("[tis]", "given")
    assert rows["correction_bounds"] == ("[0, 2]", "given")
    assert rows["eps_high"] == ("0.01", "given; the preset has 0.0004")
    assert rows["std"] == ("none", "given")
