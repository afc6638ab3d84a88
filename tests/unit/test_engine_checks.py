"""Models and layouts that the engines would refuse after loading them are refused before anything starts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from megatron_rl.config import HfConfig, read_hf_config
from megatron_rl.config.engine_checks import engine_problems
from megatron_rl.config.hf_experts import MoeShape
from tests.least import least
from tests.unit.test_moe_recipes import MODELS

QWEN = read_hf_config(MODELS / "qwen3_30b_a3b")
DEEPSEEK = read_hf_config(MODELS / "deepseek_v3")
DENSE = replace(QWEN, moe=None)
THIRDS = replace(QWEN, num_attention_heads=36, num_query_groups=6)
SMALL_HEADS = replace(DENSE, head_dim=64, ffn_hidden_size=4096)


def latent(**features: int) -> HfConfig:
    """Eight heads of latent attention, all of whose `features` are 128 unless they are given."""
    assert DEEPSEEK.mla is not None
    return replace(DEEPSEEK, num_attention_heads=8, mla=replace(DEEPSEEK.mla, **{"qk_rope_head_dim": 128, **features}))


def problems(hf: HfConfig, **engine: Any) -> list[str]:
    return list(engine_problems(least(engine={"kind": "sglang", **engine}), hf))


@pytest.mark.parametrize(
    ("hf", "engine", "message"),
    [
        (DENSE, {"tp": 4, "ep": 4}, "engine.ep=4: the model of model.path has no experts; leave it out"),
        (QWEN, {"tp": 2, "ep": 4}, r"engine.ep=4 must divide engine.tp=2, .*; use one of \[1, 2\]"),
        (THIRDS, {"tp": 6, "ep": 4}, r"engine.ep=4 must divide engine.tp=6, .*; use one of \[1, 2\]"),
        (THIRDS, {"tp": 3, "ep": 3}, r"engine.ep=3 must divide .* the 128 experts of a layer; use one of \[1\]"),
        (
            replace(QWEN, moe=MoeShape(8, 2, 100)),
            {"tp": 8},
            "engine.tp=8, engine.ep=1: 8 devices cannot share the 100 features .*; use engine.ep=8 or engine.tp=4",
        ),
        (
            replace(QWEN, num_attention_heads=36, num_query_groups=6, moe=MoeShape(8, 2, 100)),
            {"tp": 3},
            "engine.tp=3, engine.ep=1: .* features of an expert evenly; use engine.tp=2$",
        ),
        (
            QWEN,
            {"tp": 4, "dtype": "float8"},
            r"float8 with engine.tp / engine.ep=4: each device must get a multiple of 128 of the 768 features of an "
            "expert; use a larger engine.ep",
        ),
        (
            replace(THIRDS, moe=None, ffn_hidden_size=100),
            {"tp": 3},
            "engine.tp=3: so many devices cannot share the 100 features of an MLP",
        ),
        (replace(DENSE, ffn_hidden_size=2304), {"tp": 4, "dtype": "float8"}, "engine.tp=4: .* 2304 features of an MLP"),
        (
            replace(DEEPSEEK, ffn_hidden_size=16384),
            {"tp": 32, "ep": 32, "dtype": "float8"},
            "engine.tp=32: .* 2048 features of the experts that see every token; use a smaller engine.tp",
        ),
        (
            replace(SMALL_HEADS, num_attention_heads=6, num_query_groups=6),
            {"tp": 2, "dtype": "float8"},
            "engine.tp=2: .* 384 features of the keys of attention.*; use a smaller engine.tp",
        ),
        (
            replace(SMALL_HEADS, num_query_groups=1),
            {"tp": 4, "dtype": "float8"},
            "engine.tp=4: .* 256 features of the keys of attention, copies included",
        ),
        (
            latent(qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=192),
            {"tp": 8, "dtype": "float8"},
            "engine.tp=8: .* 1536 features of the heads' values",
        ),
        (
            latent(qk_nope_head_dim=64, qk_rope_head_dim=64),
            {"tp": 8, "dtype": "float8"},
            "engine.tp=8: .* 1536 features of the keys and values of attention",
        ),
        (
            latent(qk_rope_head_dim=64),
            {"tp": 8, "dtype": "float8"},
            "engine.tp=8: .* 1536 features of the queries of attention",
        ),
        (DENSE, {"tp": 3}, r"engine.tp=3: .* 32 attention heads, and 4 .*; use one of \[1, 2, 4, 8, 16, 32\]"),
        (
            replace(THIRDS, moe=None),
            {"tp": 9},
            r"engine.tp=9: .* 36 attention heads, and 6 .*; use one of \[1, 2, 3, 6, 12, 18, 36\]",
        ),
        (
            replace(DEEPSEEK, moe=None),
            {"tp": 3},
            r"engine.tp=3: .* 128 attention heads.*; use one of \[1, 2, 4, 8, 16, 32, 64, 128\]",
        ),
        (replace(DENSE, ffn_hidden_size=192), {"dtype": "float8"}, "engine.tp=1: .* 192 features of an MLP"),
    ],
)
def test_a_layout_that_sglang_would_refuse_is_refused(hf: HfConfig, engine: dict[str, Any], message: str) -> None:
    (problem,) = problems(hf, **engine)
    assert re.search(message, problem), problem


@pytest.mark.parametrize(
    ("hf", "engine"),
    [
        (DENSE, {"tp": 4}),
        (QWEN, {"tp": 4, "ep": 4}),
        (QWEN, {"tp": 4, "ep": 2}),
        (THIRDS, {"tp": 6, "ep": 2, "dtype": "float8"}),
        (DENSE, {"tp": 8}),  # keys and values of a head on two devices
        (replace(DEEPSEEK, num_query_groups=4), {"tp": 16}),
        (DEEPSEEK, {"tp": 16, "ep": 1, "dtype": "float8"}),
        (DEEPSEEK, {"tp": 16, "ep": 16, "dtype": "float8"}),
        (latent(), {"tp": 8, "dtype": "float8"}),
        (latent(v_head_dim=72), {"dtype": "float8"}),
        (
            replace(DEEPSEEK, ffn_hidden_size=16384),
            {"tp": 32, "ep": 32, "dtype": "float8", "extra_args": ["--moe-a2a-backend", "deepep"]},
        ),
        (
            replace(latent(), num_attention_heads=6),
            {"tp": 8, "dtype": "float8", "extra_args": ["--attn-dp-size=8"]},
        ),
        (DENSE, {"tp": 4, "ep": 4, "urls": ["http://engines:1"]}),  # what others have started
    ],
)
def test_a_layout_that_fits_is_not(hf: HfConfig, engine: dict[str, Any]) -> None:
    assert problems(hf, **engine) == []


def test_a_family_that_the_embedded_engine_does_not_serve_is_refused() -> None:
    (problem,) = problems(replace(DEEPSEEK, model_type="deepseek_v2"), kind="embedded")
    assert problem.startswith("engine.kind=embedded does not serve model_type=deepseek_v2 of model.path, only qwen2, ")
    assert problem.endswith("use engine.kind=sglang")
    assert problems(replace(DEEPSEEK, model_type="deepseek_v2")) == []
    assert problems(replace(QWEN, model_type="deepseek_v2"), kind="embedded", urls=["http://engines:1"]) == []
    assert problems(DEEPSEEK, kind="embedded") == []
