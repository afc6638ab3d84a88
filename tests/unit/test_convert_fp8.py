"""Sources in blocks of fp8 become exactly the numbers they mean; casts write such blocks; further heads stay away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.weights import WeightsError, fp8
from megatron_rl.weights.convert import actions
from megatron_rl.weights.convert.compare import compare
from megatron_rl.weights.convert.cuts import TargetLayout
from megatron_rl.weights.convert.opened import open_checkpoint
from tests.convert_models import convert, silent, write_config, write_model

SIZES = {"hidden_size": 200, "intermediate_size": 130, "head_dim": 66, "vocab_size": 70}
DEEPSEEK = SIZES | {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 140,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "torch_dtype": "bfloat16",
}


def is_quantised(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and "proj" in name


def write_fp8(path: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """A model in blocks, by torch alone; returns what its tensors mean."""
    plain = write_model(path, dtype=torch.bfloat16, **settings)
    stored, meant = {}, {}
    for name, tensor in plain.items():
        if not is_quantised(name, tensor):
            stored[name] = meant[name] = tensor
            continue
        rows, columns = tensor.shape
        scales = 2.0 ** torch.randint(-9, 3, (-(-rows // 128), -(-columns // 128))) * 1.37
        values = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        stored |= {name: values, f"{name}_scale_inv": scales}
        whole = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        meant[name] = values.float() * whole
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": fp8.quantization_config()}
    (path / "config.json").write_text(json.dumps(config))
    return meant


@pytest.mark.parametrize("settings", [DEEPSEEK, SIZES], ids=["deepseek_v3", "llama"])
def test_blocks_become_the_numbers_they_mean_there_and_back(settings: dict[str, Any], tmp_path: Path) -> None:
    meant = write_fp8(tmp_path / "fp8", **settings)
    source = open_checkpoint(tmp_path / "fp8")
    for dtype in (None, torch.float32):
        folder = tmp_path / str(dtype)
        layout = TargetLayout(2, 2, expert=1 if settings is SIZES else 2)
        convert(actions.hf_to_megatron(source, folder / "megatron", layout, dtype))
        convert(actions.megatron_to_hf(open_checkpoint(folder / "megatron"), folder / "hf", None))
        back = load_file(folder / "hf" / "model.safetensors")
        expected = torch.float32 if dtype else getattr(torch, settings.get("torch_dtype", "float32"))
        assert back.keys() == meant.keys()
        for name, tensor in back.items():
            assert torch.equal(tensor, meant[name].to(tensor.dtype))
            if not name.endswith("e_score_correction_bias"):  # it keeps its own
                assert tensor.dtype is (expected if is_quantised(name, tensor) else dtype or torch.bfloat16)
        assert "quantization_config" not in json.loads((folder / "hf" / "config.json").read_text())
    convert(actions.cast(source, tmp_path / "cast", torch.float16))
    for name, tensor in load_file(tmp_path / "cast" / "model.safetensors").items():
        assert torch.equal(tensor, meant[name].to(torch.float16)), name


def test_a_cast_to_fp8_writes_blocks_that_mean_nearly_the_same(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "hf", dtype=torch.bfloat16, **DEEPSEEK)
    convert(actions.cast(open_checkpoint(tmp_path / "hf"), tmp_path / "fp8", fp8.FP8))
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    for name, tensor in plain.items():
        if not is_quantised(name, tensor):
            assert torch.equal(stored[name], tensor)
            continue
        values, scales = fp8.quantise(tensor)
        assert torch.equal(stored[name].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(stored[f"{name}_scale_inv"], scales)
    described = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert described["quantization_config"]["weight_block_size"] == [128, 128]
    # What was written is read again, and is in blocks a second time.
    convert(actions.cast(open_checkpoint(tmp_path / "fp8"), tmp_path / "again", torch.bfloat16))
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == plain.keys()
    convert(actions.hf_to_megatron(open_checkpoint(tmp_path / "hf"), tmp_path / "megatron", TargetLayout(), None))
    with pytest.raises(
        WeightsError, match="a Megatron checkpoint holds no blocks of fp8; use `convert megatron-to-hf`"
    ):
        actions.cast(open_checkpoint(tmp_path / "megatron"), tmp_path / "out", fp8.FP8)


def test_differences_are_those_of_the_numbers_that_blocks_mean(tmp_path: Path) -> None:
    write_fp8(tmp_path / "fp8", **DEEPSEEK)
    blocks, plain = open_checkpoint(tmp_path / "fp8"), {}
    for dtype in (torch.bfloat16, torch.float32):
        plain[dtype] = tmp_path / str(dtype)
        convert(actions.cast(blocks, plain[dtype], dtype))
    megatron = tmp_path / "megatron"
    convert(actions.hf_to_megatron(blocks, megatron, TargetLayout(), torch.float32))
    for other in (*plain.values(), megatron, tmp_path / "fp8"):
        for sides in ((blocks, open_checkpoint(other)), (open_checkpoint(other), blocks)):
            found = compare(*sides, silent)
            assert found.is_equal, (other, found)
            assert not any(name.name.endswith("_scale_inv") for name in found.differences)
    convert(actions.cast(open_checkpoint(plain[torch.float32]), tmp_path / "again", fp8.FP8))
    found = compare(open_checkpoint(plain[torch.float32]), open_checkpoint(tmp_path / "again"), silent)
    assert not found.only_first
    assert not found.only_second
    assert 0 < max(row.max_rel for row in found.differences) <= 1 / 16  # three bits behind the leading one


def test_layers_that_predict_further_tokens_are_left_out_and_named(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "hf", **DEEPSEEK, num_nextn_predict_layers=1)
    further = {"model.layers.2.eh_proj.weight": torch.ones(4, 8), "model.layers.2.mlp.gate.weight": torch.ones(4, 200)}
    save_file(plain | further, tmp_path / "hf" / "model.safetensors")
    plan = actions.hf_to_megatron(open_checkpoint(tmp_path / "hf"), tmp_path / "megatron", TargetLayout(), None)
    assert plan.left_out == sorted(further)
    convert(plan)
    convert(actions.megatron_to_hf(open_checkpoint(tmp_path / "megatron"), tmp_path / "back", None))
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == plain.keys()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    cast = actions.cast(open_checkpoint(tmp_path / "hf"), tmp_path / "cast", torch.float16)
    convert(cast)
    assert load_file(tmp_path / "cast" / "model.safetensors").keys() == plain.keys() | further.keys()
    assert json.loads((tmp_path / "cast" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_a_plan_without_weights_says_which_layers_it_leaves_out(tmp_path: Path) -> None:
    write_config(tmp_path / "hf", **DEEPSEEK, num_nextn_predict_layers=2)
    source = open_checkpoint(tmp_path / "hf", weights_may_be_absent=True)
    plan = actions.hf_to_megatron(source, tmp_path / "megatron", TargetLayout(), None)
    assert plan.left_out == ["model.layers.2.*", "model.layers.3.*"]
