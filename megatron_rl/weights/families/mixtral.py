"""The table of Mixtral: Mistral's attention, and in every layer a router and experts under names of their own."""

from __future__ import annotations

from megatron_rl.weights.families.common import ATTENTION, GATE_UP, MLP_NORM, REPLICATED, ROW, TOP
from megatron_rl.weights.mapping import Family, Rule

EXPERTS = (
    Rule("mlp.router.weight", ("block_sparse_moe.gate.weight",), REPLICATED, ("experts hidden",)),
    Rule(
        "mlp.experts.linear_fc1.weight",
        ("block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.{expert}.w3.weight"),
        GATE_UP,
        ("expert_ffn hidden", "expert_ffn hidden"),
    ),
    Rule(
        "mlp.experts.linear_fc2.weight",
        ("block_sparse_moe.experts.{expert}.w2.weight",),
        ROW,
        ("hidden expert_ffn",),
    ),
)
FAMILY = Family(model_type="mixtral", top=TOP, layer=(*ATTENTION, MLP_NORM, *EXPERTS))
