"""The recipes' models, built on the meta device rank by rank: every shard has the parameters that the plan counts."""

from __future__ import annotations

import pytest

from tests.unit.test_moe_recipes import CASES, recipe

from .launch import run_ranks

H100 = [name for name, overrides in CASES if not overrides]
H200 = [(name, overrides) for name, overrides in CASES if overrides]


def shards(name: str, overrides: tuple[str, ...]) -> list[tuple[int, int, bool]]:
    """(stage, layers, as planned) of first and last rank of every stage."""
    from tools.plan_model import built_shards

    cfg, hf = recipe(name, *overrides)
    return [(found.stage, found.layers, found.built == found.planned) for found in built_shards(cfg, hf)]


def assert_as_planned(name: str, overrides: tuple[str, ...] = ()) -> None:
    cfg, hf = recipe(name, *overrides)
    (found,) = run_ranks(1, shards, name, overrides)
    assert [entry for entry in found if not entry[2]] == []
    assert {stage for stage, _, _ in found} == set(range(cfg.parallel.pipeline_model_parallel_size))
    assert sum(layers for _, layers, _ in found) == 2 * hf.num_layers


@pytest.mark.parallel
@pytest.mark.parametrize("name", H100)
def test_every_shard_of_a_recipe_is_as_planned(name: str) -> None:
    assert_as_planned(name)


@pytest.mark.parallel
@pytest.mark.slow
@pytest.mark.parametrize(("name", "overrides"), H200)
def test_every_shard_for_larger_devices_is_as_planned(name: str, overrides: tuple[str, ...]) -> None:
    assert_as_planned(name, overrides)
