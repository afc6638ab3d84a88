"""Names: Transformer Engine's fused norms, global layer numbers, what a checkpoint of a family holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.config import read_hf_config
from megatron_rl.weights import WeightsError
from megatron_rl.weights.families import FAMILIES, family_of
from megatron_rl.weights.mapping import mapped_parameters
from tests.tiny import Family, tiny_model


def chunk_with(*names: str, layer_number: int) -> torch.nn.Module:
    """A module tree whose one decoder layer, `layer_number` of the model, holds parameters of these names."""
    layer = torch.nn.Module()
    layer.layer_number = layer_number
    for name in names:
        *parents, leaf = name.split(".")
        owner = layer
        for parent in parents:
            if not hasattr(owner, parent):
                owner.add_module(parent, torch.nn.Module())
            owner = getattr(owner, parent)
        owner.register_parameter(leaf, torch.nn.Parameter(torch.zeros(1)))
    chunk = torch.nn.Module()
    chunk.decoder = torch.nn.Module()
    chunk.decoder.layers = torch.nn.ModuleList([layer])
    return chunk


def test_norms_fused_by_transformer_engine_are_the_layers_norms(tmp_path: Path) -> None:
    hf = read_hf_config(tiny_model(tmp_path))
    chunk = chunk_with(
        "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight", layer_number=2
    )
    assert [mapped.hf for mapped in mapped_parameters(chunk, family_of(hf), hf)] == [
        ("model.layers.1.input_layernorm.weight",),
        ("model.layers.1.post_attention_layernorm.weight",),
    ]


def test_unknown_parameter_is_refused_by_name(tmp_path: Path) -> None:
    hf = read_hf_config(tiny_model(tmp_path))
    with pytest.raises(WeightsError, match=r"decoder\.layers\.0\.mlp\.router\.weight.*families/qwen3\.py"):
        list(mapped_parameters(chunk_with("mlp.router.weight", layer_number=1), family_of(hf), hf))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model", FAMILIES)
def test_tables_name_every_tensor_that_transformers_saves(model: Family, tied: bool, tmp_path: Path) -> None:
    hf = read_hf_config(tiny_model(tmp_path, model, tied=tied))
    assert family_of(hf).hf_names(hf) == load_file(tmp_path / "model.safetensors").keys()


def test_tensors_that_checkpoints_may_hold_without_need_are_ignored(tmp_path: Path) -> None:
    hf = read_hf_config(tiny_model(tmp_path, tied=True))
    assert family_of(hf).ignores("model.layers.0.self_attn.rotary_emb.inv_freq", hf)
    assert family_of(hf).ignores("lm_head.weight", hf)
    assert not family_of(hf).ignores("model.norm.bias", hf)
