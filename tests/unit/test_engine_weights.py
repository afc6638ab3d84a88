"""Parameters of the embedded engine replaced by named tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.engines.embedded.weights import Weights, WeightsError, load_model
from tests.contract.trainer import tensors_of
from tests.tiny import tiny_model

MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "experts": {"family": "qwen3_moe", "mlp_only_layers": [0]},
    "mixtral": {"family": "mixtral"},
    "deepseek": {"family": "deepseek_v3"},
    "glm": {"family": "glm4_moe"},
}


@pytest.fixture(scope="module", params=MODELS)
def paths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("weights")
    made = [tiny_model(folder / str(seed), seed=seed, vocab_size=50, **MODELS[request.param]) for seed in (0, 1)]
    return made[0], made[1]


def weights_of(path: Path) -> Weights:
    return Weights(load_model(str(path), "float32"))


@pytest.mark.parametrize("size", [1, 4, 100])
def test_all_tensors_in_any_order_are_the_other_model(paths: tuple[Path, Path], size: int) -> None:
    weights, tensors = weights_of(paths[0]), tensors_of(paths[1])[::-1]
    for first in range(0, len(tensors), size):
        weights.replace(tensors[first : first + size])
    assert weights.checksums() == weights_of(paths[1]).checksums()


def test_the_second_name_of_tied_embeddings_is_passed_over(paths: tuple[Path, Path]) -> None:
    weights, tensors = weights_of(paths[0]), dict(tensors_of(paths[1]))
    tied = "lm_head.weight" not in tensors
    head = tensors.setdefault("lm_head.weight", torch.full_like(tensors["model.embed_tokens.weight"], 3.0))
    weights.replace([*tensors.items(), ("model.rotary_emb.inv_freq", torch.ones(3))])
    assert weights.checksums() == weights_of(paths[1]).checksums()
    assert tied == bool((head == 3.0).all())


def test_other_number_formats_are_converted(paths: tuple[Path, Path]) -> None:
    weights, tensors = weights_of(paths[0]), [(name, tensor.bfloat16()) for name, tensor in tensors_of(paths[1])]
    weights.replace(tensors)
    expected = weights_of(paths[1])
    expected.replace([(name, tensor.bfloat16().float()) for name, tensor in tensors_of(paths[1])])
    assert weights.checksums() == expected.checksums()


@pytest.mark.parametrize("place", [0, 3, -1])
def test_one_tensor_that_does_not_fit_leaves_all_as_they_were(paths: tuple[Path, Path], place: int) -> None:
    weights, tensors = weights_of(paths[0]), tensors_of(paths[1])
    before = weights.checksums()
    name, tensor = tensors[place]
    tensors[place] = (name, tensor[None])
    with pytest.raises(WeightsError, match=rf"{name} has shape \(1, .*\), served is .*discard the whole weights"):
        weights.replace(tensors)
    assert weights.checksums() == before
