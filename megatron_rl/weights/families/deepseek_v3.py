"""The table of DeepSeek-V3: latent attention, first layers dense, then experts, some of which see every token.

Layers that predict tokens further on, which checkpoints hold behind the last one, have no place in the table.
"""

from __future__ import annotations

from megatron_rl.weights.families.common import (
    DENSE_MLP,
    EXPERTS,
    GATE_UP,
    INPUT_NORM,
    MLP_NORM,
    REPLICATED,
    ROUTER,
    ROW,
    TOP,
)
from megatron_rl.weights.layouts import ColumnParallel, Layout
from megatron_rl.weights.mapping import Family, Rule

COLUMN = ColumnParallel()


def _attention(megatron: str, hf: str, layout: Layout, shape: str, when: str | None = None) -> Rule:
    return Rule(f"self_attention.{megatron}.weight", (f"self_attn.{hf}.weight",), layout, (shape,), when=when)


ATTENTION = (
    INPUT_NORM,
    _attention("linear_q_proj", "q_proj", COLUMN, "queries hidden", "has_direct_queries"),
    _attention("linear_q_down_proj", "q_a_proj", REPLICATED, "q_rank hidden", "has_query_latent"),
    _attention("q_layernorm", "q_a_layernorm", REPLICATED, "q_rank", "has_query_latent"),
    _attention("linear_q_up_proj", "q_b_proj", COLUMN, "queries q_rank", "has_query_latent"),
    _attention("linear_kv_down_proj", "kv_a_proj_with_mqa", REPLICATED, "kv_down hidden"),
    _attention("kv_layernorm", "kv_a_layernorm", REPLICATED, "kv_rank"),
    _attention("linear_kv_up_proj", "kv_b_proj", COLUMN, "kv_up kv_rank"),
    _attention("linear_proj", "o_proj", ROW, "hidden values"),
)
EXPERT_BIAS = Rule(
    "mlp.router.expert_bias",
    ("mlp.gate.e_score_correction_bias",),
    REPLICATED,
    ("experts",),
    layers="moe",
    keeps_dtype=True,
)
SHARED_EXPERTS = (
    Rule(
        "mlp.shared_experts.linear_fc1.weight",
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        GATE_UP,
        ("shared_ffn hidden", "shared_ffn hidden"),
        when="has_shared_experts",
        layers="moe",
    ),
    Rule(
        "mlp.shared_experts.linear_fc2.weight",
        ("mlp.shared_experts.down_proj.weight",),
        ROW,
        ("hidden shared_ffn",),
        when="has_shared_experts",
        layers="moe",
    ),
)
FAMILY = Family(
    model_type="deepseek_v3",
    top=TOP,
    layer=(*ATTENTION, MLP_NORM, *DENSE_MLP, *ROUTER, EXPERT_BIAS, *SHARED_EXPERTS, *EXPERTS),
)
