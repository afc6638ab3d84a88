"""Experts and latent attention: what config.json says of them, what Megatron is told, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.config import ConfigError, HfConfig, read_hf_config
from megatron_rl.config.hf_experts import MlaShape, MoeShape
from megatron_rl.config.shards import num_parameters
from megatron_rl.policy.model import expert_options, rotary_frequencies, transformer_config
from tests.parallel.dense_models import LINEAR_ROPE, LLAMA3_ROPE
from tests.parallel.policy_setup import make_config
from tests.tiny import MOE_SETTINGS, Family, tiny_model

PUBLISHED = Path(__file__).resolve().parents[1] / "model_configs"


def changed(path: Path, family: Family, **changes: Any) -> HfConfig:
    """The facts of a tiny model whose config.json was changed; None takes a key away."""
    file = tiny_model(path, family) / "config.json"
    described = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in described.items() if value is not None}))
    return read_hf_config(path)


@pytest.mark.parametrize(
    ("model", "moe", "mla"),
    [
        ("qwen3_30b_a3b", MoeShape(num_experts=128, top_k=8, ffn_hidden_size=768), None),
        ("qwen3_235b_a22b", MoeShape(num_experts=128, top_k=8, ffn_hidden_size=1536), None),
        (
            "deepseek_v3",
            MoeShape(
                num_experts=256,
                top_k=8,
                ffn_hidden_size=2048,
                shared_ffn_hidden_size=2048,
                dense_layers=(0, 1, 2),
                score_function="sigmoid",
                scaling_factor=2.5,
                num_groups=8,
                top_groups=4,
                expert_bias=True,
            ),
            MlaShape(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        ),
    ],
)
def test_published_configs_are_read(model: str, moe: MoeShape, mla: MlaShape | None) -> None:
    hf = read_hf_config(PUBLISHED / model)
    assert (hf.moe, hf.mla) == (moe, mla)
    assert (hf.head_dim, hf.rotary_dim) == ((192, 64) if mla else (128, 128))


def test_experts_are_found_under_both_of_their_names(tmp_path: Path) -> None:
    written = changed(tmp_path, "qwen3_moe")  # transformers 5 says num_local_experts
    assert changed(tmp_path, "qwen3_moe", num_experts=8, num_local_experts=None).moe == written.moe


def test_layers_without_experts_are_told_by_step_or_by_name(tmp_path: Path) -> None:
    hf = changed(tmp_path, "qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert hf.moe is not None
    assert (hf.moe.dense_layers, hf.moe_layers) == ((0, 2, 3, 4), (1, 5))
    assert expert_options(hf)["moe_layer_freq"] == [0, 1, 0, 0, 0, 1]
    hf = changed(tmp_path, "qwen3_moe", mlp_only_layers=[0, 1])
    assert (hf.moe, hf.moe_layers, expert_options(hf)) == (None, (), {})


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {"num_local_experts": None}, "the key 'num_experts' is missing"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 of 8 experts"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 with norm_topk_prob=true"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size=0 is not a positive whole number"),
        ("mixtral", {"sliding_window": 64}, "sliding_window=64 is not supported"),
        ("deepseek_v3", {"n_group": 3}, "n_group=3, topk_group=1 do not fit 2 chosen of 8 experts"),
        ("deepseek_v3", {"topk_group": 2}, "num_experts_per_tok=2 with topk_group=2 is not supported"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=false is not supported with sigmoid scores"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported; only sigmoid"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy' is not supported; only noaux_tc"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "topk_method='group_limited_greedy' is not supported"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported; only False"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False is not supported"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=false is not supported with sigmoid scores"),
        ("glm4_moe", {"topk_group": 2}, "num_experts_per_tok=2 with topk_group=2 is not supported"),
        ("glm4_moe", {"head_dim": 18, "rope_parameters": None}, "=0.5 of head_dim=18 gives no even number of features"),
        ("deepseek_v3", {"kv_lora_rank": None}, "the key 'kv_lora_rank' is missing"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    family: Family, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(tmp_path, family, **changes)


@pytest.mark.parametrize("family", MOE_SETTINGS)
def test_parameters_are_counted_as_transformers_saves_them(family: Family, tmp_path: Path) -> None:
    tensors = load_file(tiny_model(tmp_path, family) / "model.safetensors")
    expected = sum(tensor.numel() for name, tensor in tensors.items() if not name.endswith("e_score_correction_bias"))
    assert num_parameters(read_hf_config(tmp_path)) == expected


@pytest.mark.parametrize("partial", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_a_part_of_each_head_is_rotated_as_in_transformers(kind: str, partial: float, tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

    rope = (LLAMA3_ROPE if kind == "llama3" else LINEAR_ROPE) | {"rope_type": kind, "partial_rotary_factor": partial}
    hf = read_hf_config(tiny_model(tmp_path, "glm4_moe", rope_parameters=rope))
    theirs = Glm4MoeRotaryEmbedding(AutoConfig.from_pretrained(tmp_path)).inv_freq
    assert hf.rotary_dim == 16 * partial
    torch.testing.assert_close(rotary_frequencies(hf), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", MOE_SETTINGS)
def test_nothing_balances_the_load_and_routers_compute_in_fp32(family: Family, tmp_path: Path) -> None:
    cfg = make_config(tiny_model(tmp_path, family))
    config = transformer_config(read_hf_config(tmp_path), cfg.model, cfg.parallel)
    assert config.moe_router_load_balancing_type == "none"
    assert (config.moe_aux_loss_coeff, config.moe_z_loss_coeff, config.moe_router_bias_update_rate) == (0, None, 0)
    assert config.moe_router_dtype == "fp32"
    assert (config.moe_expert_capacity_factor, config.moe_router_force_load_balancing) == (None, False)
