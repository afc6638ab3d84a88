"""Megatron itself reads what the converter writes of models with experts, at every expert-parallel layout, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.weights.companions import copy_companions
from megatron_rl.weights.convert import actions
from megatron_rl.weights.convert.compare import compare
from megatron_rl.weights.convert.cuts import TargetLayout
from megatron_rl.weights.convert.opened import open_checkpoint
from tests.convert_models import convert, silent
from tests.parallel.launch import run_ranks
from tests.parallel.policy_setup import layout, make_config
from tests.parallel.test_convert_checkpoints import (
    STOCK,
    TRAINED,
    load_into_our_model,
    load_into_stock_megatron,
    load_resharded,
    train_and_save,
)
from tests.tiny import tiny_models

pytestmark = pytest.mark.parallel

VOCAB_SIZE = 320
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"family": "qwen3_moe"},
    "qwen3_moe-dense-layer": {"family": "qwen3_moe", "mlp_only_layers": [1], "tied": True},
    "mixtral": {"family": "mixtral"},
    "deepseek_v3": {"family": "deepseek_v3"},
    "glm4_moe": {"family": "glm4_moe"},
}
CUTS = {
    "qwen3_moe": TargetLayout(2, 2, expert=2),
    "qwen3_moe-dense-layer": TargetLayout(1, 2, 1, first=1, expert=4),
    "mixtral": TargetLayout(2, 2, virtual=2, expert=2, expert_tensor=2),
    "deepseek_v3": TargetLayout(2, 1, expert=8),
    "glm4_moe": TargetLayout(2, 2, expert=2),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"data_parallel_size": 4, "expert_model_parallel_size": 2},
    "tp2-ep2": {
        "tensor_model_parallel_size": 2,
        "data_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
    },
    "pp2-vpp2-ep2": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "data_parallel_size": 2,
        "expert_model_parallel_size": 2,
    },
    "tp2-pp2-etp2": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_tensor_parallel_size": 2,
    },
}
STOCK_IN = {"pipeline_model_parallel_size": 2, "data_parallel_size": 2, "expert_model_parallel_size": 2}
WITHOUT_STOCK = ("deepseek_v3",)
"""Megatron-Core 0.16.1 builds latent attention with Transformer Engine alone."""
TRAINED_IN = "tp2-ep2"


# ------------------------------------------------------------------------------------------------------- on the ranks


def load_converted(paths: dict[str, Path], folder: Path) -> dict[tuple[str, str], list[str]]:
    """(model, layout) -> names of exported tensors that are not the source's, bit for bit."""
    from megatron_rl.policy import distributed

    found = {}
    for name, parallel in LAYOUTS.items():
        with layout(make_config("unused", parallel)):
            for model, path in paths.items():
                found[model, name] = load_into_our_model(path, folder / model, parallel)
    with layout(make_config("unused", STOCK_IN)):
        for model, path in paths.items():
            if model not in WITHOUT_STOCK:
                found[model, STOCK] = load_into_stock_megatron(path, folder / model, STOCK_IN)
    train_and_save(paths["qwen3_moe-dense-layer"], folder / "run", LAYOUTS[TRAINED_IN])
    distributed.shutdown()
    return found


def verify_all(paths: dict[str, Path], good: Path, bad: Path) -> dict[str, list[Any]]:
    from megatron_rl.verify import SENTENCES, verify_log_probs

    return {
        model: [verify_log_probs(side / model, path, SENTENCES[:2], 1e-5) for side in (good, bad)]
        for model, path in paths.items()
    }


# ---------------------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tiny_models(tmp_path_factory.mktemp("models"), MODELS, layers=4, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def folder(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    for name, path in paths.items():
        convert(actions.hf_to_megatron(open_checkpoint(path), folder / name, CUTS[name], None))
    return folder


@pytest.fixture(scope="module")
def loaded(paths: dict[str, Path], folder: Path) -> list[dict[tuple[str, str], list[str]]]:
    return run_ranks(4, load_converted, paths, folder, timeout=300)


@pytest.fixture(scope="module")
def verified(paths: dict[str, Path], folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Verdicts of what was converted, and of the same with one matrix of all experts of a layer changed."""
    bad = tmp_path_factory.mktemp("bad")
    for model, path in paths.items():
        tensors = load_file(path / "model.safetensors")
        for name in tensors:
            if "layers.2.mlp.experts" in name or "layers.2.block_sparse_moe.experts" in name:
                tensors[name] *= 1.5
        copy_companions(path, bad / model)
        save_file(tensors, bad / model / "model.safetensors", metadata={"format": "pt"})
    return run_ranks(1, verify_all, paths, folder, bad, timeout=240)[0]


# ---------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("name", [*LAYOUTS, STOCK])
@pytest.mark.parametrize("model", MODELS)
def test_megatron_loads_experts_in_any_layout(
    model: str, name: str, loaded: list[dict[tuple[str, str], list[str]]]
) -> None:
    if name == STOCK and model in WITHOUT_STOCK:
        assert (model, name) not in loaded[0]
    else:
        assert [rank[model, name] for rank in loaded] == [[]] * 4


def test_experts_that_were_trained_apart_become_a_hugging_face_directory(
    loaded: object, paths: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    hf = paths["qwen3_moe-dense-layer"]
    source = open_checkpoint(folder / TRAINED, hf)
    convert(actions.megatron_to_hf(source, tmp_path / "hf", None))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").dtype is torch.bfloat16
    assert compare(source, open_checkpoint(tmp_path / "hf"), silent).is_equal
    moved = compare(open_checkpoint(hf), open_checkpoint(tmp_path / "hf"), silent)
    assert any("experts.7." in row.name for row in moved.differences if row.max_abs)


def test_a_resharded_checkpoint_holds_the_state_of_all_experts(
    loaded: object, paths: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "cut").mkdir()
    cut = TargetLayout(1, 2, expert=4)
    convert(actions.reshard(open_checkpoint(folder / TRAINED), tmp_path / "cut" / "policy", cut))
    assert compare(open_checkpoint(folder / TRAINED), open_checkpoint(tmp_path / "cut"), silent).is_equal
    run_ranks(2, load_resharded, paths["qwen3_moe-dense-layer"], tmp_path / "cut", tmp_path / "again", timeout=120)
    found = compare(open_checkpoint(tmp_path / "again"), open_checkpoint(folder / TRAINED), silent)
    differing = {row.name for row in found.differences if row.max_abs}
    assert all("embedding.word_embeddings.weight" in name for name in differing)  # its padding is another
    assert sum("optimizer.state.exp_avg_sq" in row.name and ".experts." in row.name for row in found.differences) > 10
    assert not found.only_first
    assert not found.only_second


@pytest.mark.parametrize("model", MODELS)
def test_experts_go_there_and_back_bit_by_bit(model: str, paths: dict[str, Path], folder: Path, tmp_path: Path) -> None:
    convert(actions.megatron_to_hf(open_checkpoint(folder / model), tmp_path / "back", None))
    back, source = (load_file(path / "model.safetensors") for path in (tmp_path / "back", paths[model]))
    assert back.keys() == source.keys()
    assert all(torch.equal(back[name], source[name]) and back[name].dtype is source[name].dtype for name in source)


@pytest.mark.parametrize("model", MODELS)
def test_verify_names_the_layer_of_experts_that_deviates(model: str, verified: dict[str, Any]) -> None:
    good, bad = verified[model]
    assert good.is_equal
    assert good.first_deviation is None
    assert not bad.is_equal
    assert bad.first_deviation.startswith("model.layers.2.mlp ")
