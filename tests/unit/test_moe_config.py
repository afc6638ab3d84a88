"""Settings of routing that cannot be meant are refused before anything starts, each with the fix."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from megatron_rl.config import read_hf_config
from megatron_rl.config.hf_experts import MoeShape
from megatron_rl.config.moe_checks import routing_problems
from tests.least import least
from tests.unit.test_moe_recipes import MODELS


@pytest.mark.parametrize(
    ("sections", "messages"),
    [
        ({}, []),
        ({"moe": {"routing_replay": False}}, []),  # a bare `off` in YAML
        ({"moe": {"routing_replay": "R2"}}, []),
        ({"moe": {"routing_replay": "R3"}}, ["moe.routing_replay=R3 .* set engine.routed_experts=true"]),
        ({"moe": {"routing_replay": "R3", "max_routing_mismatch": 0.2}, "engine": {"routed_experts": True}}, []),
        (
            {
                "moe": {"routing_replay": "R3"},
                "engine": {"routed_experts": True},
                "algorithm": {"old_logprobs": "rollout"},
            },
            [],
        ),
        (
            {"moe": {"routing_replay": "R2"}, "algorithm": {"old_logprobs": "rollout"}},
            ["R2 .* use old_logprobs=recompute"],
        ),
        (
            {"moe": {"routing_replay": "R2"}, "algorithm": {"old_logprobs": "reuse"}},
            ["R2 .*old_logprobs=reuse has none"],
        ),
        (
            {"moe": {"max_routing_mismatch": 0.2}, "algorithm": {"old_logprobs": "rollout"}},
            [
                "max_routing_mismatch=0.2 compares .* engine.routed_experts=false",
                "max_routing_mismatch=0.2 is measured",
            ],
        ),
    ],
)
def test_routing_of_a_model_with_experts(sections, messages):
    assert_problems("qwen3_30b_a3b", sections, messages)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"moe": {"routing_replay": "R2"}},
            "moe.routing_replay=R2: the model of model.path has no experts; leave it out",
        ),
        ({"moe": {"max_routing_mismatch": 0.0}}, "moe.max_routing_mismatch=0.0: the model"),
        ({"engine": {"routed_experts": True}}, "engine.routed_experts=true: the model"),
        ({}, None),
    ],
)
def test_routing_of_a_dense_model(sections, message):
    assert_problems("qwen3_30b_a3b", sections, [] if message is None else [message], moe=None)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"tie_word_embeddings": True}, "engine.kind=sglang does not heed tie_word_embeddings"),
        ({"moe": MoeShape(8, 2, 32, dense_layers=(0,))}, "engine.kind=sglang does not heed mlp_only_layers"),
        (
            {"model_type": "glm4_moe", "tie_word_embeddings": True},
            "does not heed tie_word_embeddings .* of a glm4_moe model",
        ),
        ({"model_type": "glm4_moe", "moe": MoeShape(8, 2, 32, dense_layers=(0,))}, None),
        ({"model_type": "mixtral", "tie_word_embeddings": True}, None),
    ],
)
def test_what_sglang_would_compute_otherwise(facts, message):
    assert_problems("qwen3_30b_a3b", {"engine": {"kind": "sglang"}}, [] if message is None else [message], **facts)


def assert_problems(model: str, sections: dict[str, Any], messages: list[str], **facts: Any) -> None:
    hf = replace(read_hf_config(MODELS / model), **facts)
    found = list(routing_problems(least(**sections), hf))
    assert len(found) == len(messages), found
    for problem, message in zip(found, messages, strict=True):
        assert re.search(message, problem), problem
