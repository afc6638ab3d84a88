"""Layouts that do not fit a mixture of experts are refused before anything starts, with the fix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config import ConfigError, check, load_config
from megatron_rl.config.layout_checks import layout_problems
from megatron_rl.data.tiny_model import write_tiny_model

from .test_moe_recipes import ROOT, recipe

SP = "parallel.sequence_parallel=true"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["parallel.expert_model_parallel_size=16", "parallel.data_parallel_size=8"],
            r"expert_model_parallel_size=16 does not divide the 8 experts of a layer; use one of \[1, 2, 4, 8\]",
        ),
        (
            [
                "parallel.expert_model_parallel_size=1",
                "parallel.expert_tensor_parallel_size=6",
                "parallel.data_parallel_size=3",
            ],
            "expert_tensor_parallel_size=6 does not divide the 128 features of an expert",
        ),
        (
            ["parallel.sequence_parallel=false"],
            "with sequence_parallel=false: experts .* set parallel.sequence_parallel=true",
        ),
        (["engine.routed_experts=false"], "routing_replay=R3 .* set engine.routed_experts=true"),
        (
            ["algorithm.renormalise_after_rejection=true", "algorithm.corrections=[tis]"],
            "nothing rejects tokens; add one of icepop, mis, seq_mis to .*, with experts set moe.max_routing_mismatch",
        ),
        (["algorithm.normalisation=token_mean"], "use normalisation=seq_mean_token_mean"),
        (["algorithm.max_tokens_per_microbatch=8191"], "so the cap must be one; use 8190"),
    ],
)
def test_what_does_not_fit_the_experts_is_refused(tmp_path: Path, words: list[str], message: str) -> None:
    write_tiny_model(tmp_path / "model", seed=0, experts=8)
    with pytest.raises(ConfigError, match=message):
        check(load_config(ROOT / "configs" / "tiny_moe_gspo.yaml", [f"model.path={tmp_path / 'model'}", *words]), False)


@pytest.mark.parametrize("word", ["moe.max_routing_mismatch=0.1", "algorithm.corrections=[mis]"])
def test_a_recount_needs_anything_that_rejects(tmp_path: Path, word: str) -> None:
    write_tiny_model(tmp_path / "model", seed=0, experts=8)
    words = [f"model.path={tmp_path / 'model'}", "algorithm.renormalise_after_rejection=true", word]
    check(load_config(ROOT / "configs" / "tiny_moe_gspo.yaml", words), with_files=False)


def test_expert_ranks_of_a_dense_model_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", seed=0)
    words = [f"model.path={tmp_path / 'model'}", "run_dir=x", SP, "parallel.expert_model_parallel_size=2"]
    with pytest.raises(ConfigError, match="expert_model_parallel_size=2: qwen3 has no experts"):
        check(load_config(ROOT / "configs" / "quickstart.yaml", words), False)


def test_latent_attention_over_tensor_parallel_ranks_needs_their_parts_of_the_sequence() -> None:
    cfg, hf = recipe("deepseek_v3", "parallel.sequence_parallel=false", "parallel.expert_model_parallel_size=1")
    dense = replace(hf, moe=None)
    (problem,) = layout_problems(cfg, dense)
    assert "tensor_model_parallel_size=4 with sequence_parallel=false: each of these ranks would keep" in problem
    assert problem.endswith("set parallel.sequence_parallel=true")
    assert list(layout_problems(cfg, replace(dense, mla=None))) == []


def test_the_recipes_pass_every_check() -> None:
    for name in ("qwen3_30b_a3b", "qwen3_235b_a22b", "deepseek_v3"):
        check(recipe(name)[0], with_files=False)
