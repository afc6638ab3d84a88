"""Rows that the Llama-like families share; a family's own file says which of them it has."""

from __future__ import annotations

from megatron_rl.weights.layouts import GateUp, QueryKeyValue, Replicated, RowParallel, Vocabulary
from megatron_rl.weights.mapping import EMBEDDING, OUTPUT_LAYER, Rule

REPLICATED, ROW, VOCABULARY, GATE_UP, QKV = Replicated(), RowParallel(), Vocabulary(), GateUp(), QueryKeyValue()

TOP = (
    Rule(EMBEDDING, ("model.embed_tokens.weight",), VOCABULARY),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), REPLICATED),
    Rule(OUTPUT_LAYER, ("lm_head.weight",), VOCABULARY),
)
ATTENTION = (
    Rule("input_layernorm.weight", ("input_layernorm.weight",), REPLICATED),
    Rule(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        QKV,
    ),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), ROW),
)
QKV_BIAS = (
    Rule(
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        QKV,
        when="qkv_bias",
    ),
)
QK_NORM = (
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), REPLICATED, when="qk_norm"),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), REPLICATED, when="qk_norm"),
)
MLP = (
    Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), REPLICATED),
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GATE_UP),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), ROW),
)
