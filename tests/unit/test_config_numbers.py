"""Numbers with which nothing could run are refused at once, each by its key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megatron_rl.config import Config, ConfigError, check, validate
from tests.least import LEAST

from .test_config import put
from .test_moe_recipes import MODELS

VALUES = LEAST | {
    "model": {"path": str(MODELS / "qwen3_30b_a3b")},
    "rollout": {"max_prompt_tokens": 64, "max_response_tokens": 128},
}


def unbounded(schema: Any, name: str) -> Iterator[str]:
    """Numbers with a fraction, in what pydantic says of a field, that lack a lower or an upper bound."""
    if isinstance(schema, list):
        for part in schema:
            yield from unbounded(part, name)
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "number" and not (
        {"minimum", "exclusiveMinimum"} & schema.keys() and {"maximum", "exclusiveMaximum"} & schema.keys()
    ):
        yield name
    for part in schema.values():
        yield from unbounded(part, name)


def test_every_number_with_a_fraction_has_bounds() -> None:
    schema = Config.model_json_schema()
    sections = [schema, *schema["$defs"].values()]
    assert [n for s in sections for name, field in s["properties"].items() for n in unbounded(field, name)] == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer__betas", [1, 2]),
        ("optimizer__betas", [-1, 0.9]),
        ("optimizer__lr", 10),
        ("optimizer__weight_decay", 1e300),
        ("algorithm__kl_coef", 1e300),
        ("algorithm__dual_clip", 1e300),
        ("eval__temperature", 1e300),
        ("rollout__oversample", 1e300),
        ("sft__stop_value", 1e300),
        ("engine__tp", 1_000_000_000),
        ("engine__replicas", 99_999_999),
        ("steps", 10**400),
        ("rollout__groups_per_step", 10**400),
        ("rollout__top_k", -(10**400)),
        ("cluster__spare_nodes", 99_999_999),
        ("parallel__context_parallel_size", 1_000_000_000),
        ("parallel", {"context_parallel_size": 10_000, "data_parallel_size": 10_000}),
    ],
)
def test_numbers_with_which_nothing_could_run_are_refused(key: str, value: Any) -> None:
    changed = put(VALUES, engine__kind="sglang", **{key: value})
    with pytest.raises(ConfigError, match=key.replace("__", r"\.")):
        validate(changed)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"optimizer__min_lr": 1e-3, "optimizer__lr": 1e-4}, r"optimizer: min_lr=0\.001 is above lr=0\.0001"),
        ({"cluster__min_dp": 9}, r"cluster\.min_dp=9 is more than parallel\.data_parallel_size=1"),
        ({"cluster__min_replicas": 3}, r"cluster\.min_replicas=3 is more than engine\.replicas=1"),
        (
            {"engine__kind": "sglang", "engine__context_length": 191},
            r"engine\.context_length=191 cannot hold the longest sequence of 192 tokens",
        ),
        ({"eval__temperature": 1e-30}, r"eval: temperature=1e-30: .* use 0, or at least 0\.001"),
        ({"sft__stop_value": 1.5}, r"sft\.stop_value=1\.5: format_valid is a share"),
    ],
)
def test_numbers_that_contradict_others_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check(validate(put(VALUES, **changes)), with_files=False)
