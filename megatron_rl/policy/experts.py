"""What Megatron's config is told about a model's experts; no modules, so that importing it loads no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_rl.policy.layer_spec import has_transformer_engine

if TYPE_CHECKING:
    from megatron_rl.config import HfConfig


def expert_options(hf: HfConfig) -> dict[str, Any]:
    """Fields of Megatron's config about experts; none for a dense model.

    Routers compute in fp32. Nothing balances the load: no auxiliary loss, no change of the biases that some models add
    for choosing. Each token gets all its experts, so that what it computes does not depend on the other tokens.
    """
    moe = hf.moe
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.num_experts,
        # A list makes Megatron's checkpoints number the layers one by one; models without dense layers need none.
        "moe_layer_freq": [int(layer in hf.moe_layers) for layer in range(hf.num_layers)] if moe.dense_layers else 1,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": moe.score_function,
        # Softmax over the chosen logits is softmax over all of them, divided by the sum of the chosen.
        "moe_router_pre_softmax": moe.score_function == "softmax" and not moe.normalise_top_k,
        "moe_router_topk_scaling_factor": moe.scaling_factor if moe.scaling_factor != 1.0 else None,
        "moe_router_num_groups": moe.num_groups,
        "moe_router_group_topk": moe.top_groups,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_grouped_gemm": has_transformer_engine(),
        "moe_permute_fusion": has_transformer_engine(),
    }
