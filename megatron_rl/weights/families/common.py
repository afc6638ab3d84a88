"""Rows that the Llama-like families share; a family's own file says which of them it has."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.weights.layouts import GateUp, QueryKeyValue, Replicated, RowParallel, Vocabulary
from megatron_rl.weights.mapping import EMBEDDING, OUTPUT_LAYER, Rule

REPLICATED, ROW, VOCABULARY, GATE_UP, QKV = Replicated(), RowParallel(), Vocabulary(), GateUp(), QueryKeyValue()

TOP = (
    Rule(EMBEDDING, ("model.embed_tokens.weight",), VOCABULARY, ("vocab hidden",)),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), REPLICATED, ("hidden",)),
    Rule(OUTPUT_LAYER, ("lm_head.weight",), VOCABULARY, ("vocab hidden",)),
)
INPUT_NORM = Rule("input_layernorm.weight", ("input_layernorm.weight",), REPLICATED, ("hidden",))
ATTENTION = (
    INPUT_NORM,
    Rule(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        QKV,
        ("queries hidden", "keys hidden", "keys hidden"),
    ),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), ROW, ("hidden queries",)),
)
QKV_BIAS = (
    Rule(
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        QKV,
        ("queries", "keys", "keys"),
        when="qkv_bias",
    ),
)
QK_NORM = (
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), REPLICATED, ("head",), when="qk_norm"),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), REPLICATED, ("head",), when="qk_norm"),
)
MLP = (
    Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), REPLICATED, ("hidden",)),
    Rule(
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        GATE_UP,
        ("ffn hidden", "ffn hidden"),
    ),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), ROW, ("hidden ffn",)),
)
# Of models with experts: the norm is everybody's, the matrices are those of the layers without experts.
MLP_NORM, *_MATRICES = MLP
DENSE_MLP = tuple(replace(rule, layers="dense") for rule in _MATRICES)
ROUTER = (Rule("mlp.router.weight", ("mlp.gate.weight",), REPLICATED, ("experts hidden",), layers="moe"),)
EXPERTS = (
    Rule(
        "mlp.experts.linear_fc1.weight",
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        GATE_UP,
        ("expert_ffn hidden", "expert_ffn hidden"),
        layers="moe",
    ),
    Rule(
        "mlp.experts.linear_fc2.weight",
        ("mlp.experts.{expert}.down_proj.weight",),
        ROW,
        ("hidden expert_ffn",),
        layers="moe",
    ),
)
