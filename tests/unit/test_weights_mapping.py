"""Names: Transformer Engine's fused norms, global layer numbers, what a checkpoint of a family holds."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config import read_hf_config
from megatron_rl.weights import WeightsError
from megatron_rl.weights.families import FAMILIES, family_of
from megatron_rl.weights.layouts import Replicated, Shard
from megatron_rl.weights.load import _load
from megatron_rl.weights.mapping import Mapped, mapped_parameters
from megatron_rl.weights.reader import SINGLE, SafetensorsReader
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


def test_experts_and_latents_of_transformer_engine_have_their_names(tmp_path: Path) -> None:
    hf = read_hf_config(tiny_model(tmp_path, "deepseek_v3"))
    names = [
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "mlp.experts.linear_fc1.weight1",
        "mlp.experts.linear_fc2.weight7",
    ]
    mapped = list(mapped_parameters(chunk_with(*names, layer_number=2), family_of(hf), hf))
    assert [parameter.hf for parameter in mapped] == [
        ("model.layers.1.self_attn.q_a_layernorm.weight",),
        ("model.layers.1.self_attn.kv_a_layernorm.weight",),
        ("model.layers.1.mlp.experts.1.gate_proj.weight", "model.layers.1.mlp.experts.1.up_proj.weight"),
        ("model.layers.1.mlp.experts.7.down_proj.weight",),
    ]
    assert [parameter.expert for parameter in mapped] == [None, None, 1, 7]
    assert mapped[3].hf_of(0) == ("model.layers.1.mlp.experts.0.down_proj.weight",)


def test_experts_have_no_place_in_a_dense_layer(tmp_path: Path) -> None:
    hf = read_hf_config(tiny_model(tmp_path, "deepseek_v3"))
    with pytest.raises(WeightsError, match=r"mlp\.experts\.linear_fc1\.weight0"):
        list(mapped_parameters(chunk_with("mlp.experts.linear_fc1.weight0", layer_number=1), family_of(hf), hf))


def test_only_as_many_predicting_layers_are_ignored_as_the_config_names(tmp_path: Path) -> None:
    hf = read_hf_config(tiny_model(tmp_path, "deepseek_v3", num_nextn_predict_layers=1))
    assert family_of(hf).ignores("model.layers.2.eh_proj.weight", hf)
    assert not family_of(hf).ignores("model.layers.3.eh_proj.weight", hf)
    assert not family_of(hf).ignores("model.layers.1.eh_proj.weight", hf)


def test_unknown_parameter_is_refused_by_name(tmp_path: Path) -> None:
    hf = read_hf_config(tiny_model(tmp_path))
    with pytest.raises(WeightsError, match=r"decoder\.layers\.0\.mlp\.router\.weight.*families/qwen3\.py"):
        list(mapped_parameters(chunk_with("mlp.router.weight", layer_number=1), family_of(hf), hf))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model", FAMILIES)
def test_tables_name_every_tensor_that_transformers_saves(model: Family, tied: bool, tmp_path: Path) -> None:
    hf = read_hf_config(tiny_model(tmp_path, model, tied=tied))
    assert family_of(hf).hf_shapes(hf).keys() == load_file(tmp_path / "model.safetensors").keys()


def test_tensors_that_checkpoints_may_hold_without_need_are_ignored(tmp_path: Path) -> None:
    hf = read_hf_config(tiny_model(tmp_path, tied=True))
    assert family_of(hf).ignores("model.layers.0.self_attn.rotary_emb.inv_freq", hf)
    assert family_of(hf).ignores("lm_head.weight", hf)
    assert not family_of(hf).ignores("model.norm.bias", hf)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused_with_tensor_and_file(value: float, tmp_path: Path) -> None:
    weight = torch.ones(3, 4)
    save_file({"a.weight": weight, "b.weight": weight.masked_fill(torch.eye(3, 4) > 0, value)}, tmp_path / SINGLE)
    reader = SafetensorsReader(tmp_path)
    hf = read_hf_config(tiny_model(tmp_path / "model", "llama"))
    for name, message in (("a.weight", None), ("b.weight", r"b\.weight in model\.safetensors holds NaN or infinity")):
        mapped = Mapped("layer", torch.zeros(3, 4), (name,), Replicated(), is_tied_copy=False)
        with pytest.raises(WeightsError, match=message) if message else nullcontext():
            _load(mapped, [reader[name]], tmp_path, Shard(0, 1, 3), hf)
    save_file({"a.weight": weight * 1e6}, tmp_path / SINGLE)
    narrow = Mapped("layer", torch.zeros(3, 4, dtype=torch.float16), ("a.weight",), Replicated(), is_tied_copy=False)
    with pytest.raises(WeightsError, match=r"a\.weight holds numbers that are too large for float16; .* model\.dtype"):
        _load(narrow, [SafetensorsReader(tmp_path)["a.weight"]], tmp_path, Shard(0, 1, 3), hf)
