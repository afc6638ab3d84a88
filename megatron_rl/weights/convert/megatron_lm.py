"""What Megatron-LM wants in a checkpoint besides weights: arguments and empty entries, which nothing of ours reads."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from megatron_rl.config import HfConfig
from megatron_rl.weights.convert.cuts import TargetLayout
from megatron_rl.weights.convert.stored_names import LAYERS, are_alike
from megatron_rl.weights.convert.tensors import Rows
from megatron_rl.weights.convert.torch_dist_target import saved


def extra_states(stored: Mapping[str, Mapping[tuple[int, ...], Rows]]) -> dict[str, bytes]:
    """The entries that Megatron's linear layers ask for besides their weights: empty, as without fp8."""
    empty, found = saved([None]), {}
    for name, planes in stored.items():
        if not (name.startswith(LAYERS) and name.endswith(".weight") and ".linear_" in name):
            continue
        counts = [max(sizes) + 1 for sizes in zip(*planes, strict=True)] or [1]
        for index in planes:
            place = ".".join(map(str, index or (0,)))
            found[f"{name.removesuffix('weight')}_extra_state/shard_{place}_{'.'.join(map(str, counts))}"] = empty
    return found


def megatron_lm_arguments(hf: HfConfig, layout: TargetLayout, padded_vocab_size: int, dtype: torch.dtype) -> Namespace:
    """What Megatron-LM compares with its command line, or takes over with --use-checkpoint-args."""
    scaling = hf.rope_scaling or {}
    is_llama3 = scaling.get("rope_type", scaling.get("type")) == "llama3"
    return Namespace(
        num_layers=hf.num_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.ffn_hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_query_groups,
        group_query_attention=hf.num_query_groups != hf.num_attention_heads,
        kv_channels=hf.head_dim,
        seq_length=hf.max_position_embeddings,
        max_position_embeddings=hf.max_position_embeddings,
        position_embedding_type="rope",
        add_position_embedding=True,
        use_rotary_position_embeddings=True,
        rotary_base=int(hf.rope_theta),
        rotary_percent=hf.rotary_percent,
        rotary_interleaved=False,
        use_rope_scaling=is_llama3,
        rope_scaling_factor=float(scaling["factor"]) if is_llama3 else 8.0,
        normalization="RMSNorm",
        norm_epsilon=hf.rms_norm_eps,
        qk_layernorm=hf.qk_norm,
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=hf.qkv_bias,
        untie_embeddings_and_output_weights=not hf.tie_word_embeddings,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        vocab_size=hf.vocab_size,
        padded_vocab_size=padded_vocab_size,
        make_vocab_size_divisible_by=layout.vocab_multiple,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual,
        decoder_first_pipeline_num_layers=layout.first,
        decoder_last_pipeline_num_layers=layout.last,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        **_expert_arguments(hf),
        **_latent_arguments(hf),
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        tokenizer_type="HuggingFaceTokenizer",
        iteration=0,
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )


def _expert_arguments(hf: HfConfig) -> dict[str, Any]:
    moe = hf.moe
    if moe is None:
        return {"num_experts": None}
    return {
        "num_experts": moe.num_experts,
        "moe_layer_freq": 1 if are_alike(hf) else [int(layer in hf.moe_layers) for layer in range(hf.num_layers)],
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": moe.score_function,
        "moe_router_pre_softmax": moe.score_function == "softmax" and not moe.normalise_top_k,
        "moe_router_topk_scaling_factor": moe.scaling_factor,
        "moe_router_num_groups": moe.num_groups,
        "moe_router_group_topk": moe.top_groups,
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
    }


def _latent_arguments(hf: HfConfig) -> dict[str, Any]:
    return {"multi_latent_attention": hf.mla is not None, **(asdict(hf.mla) if hf.mla is not None else {})}
