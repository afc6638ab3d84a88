"""What Megatron-LM wants in a checkpoint besides weights: arguments and empty entries, which nothing of ours reads."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence

import torch

from megatron_rl.config import HfConfig
from megatron_rl.weights.convert.cuts import TargetLayout
from megatron_rl.weights.convert.tensors import Rows
from megatron_rl.weights.convert.torch_dist_target import saved


def extra_states(stored: Mapping[str, Sequence[Rows]], hf: HfConfig) -> dict[str, bytes]:
    """The entries that Megatron's linear layers ask for besides their weights: empty, as without fp8."""
    empty, count = saved([None]), hf.num_layers
    layers = [name.removesuffix("weight") for name in stored if ".linear_" in name and name.endswith(".weight")]
    return {f"{name}_extra_state/shard_{layer}_{count}": empty for name in layers for layer in range(count)}


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
        rotary_percent=1.0,
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
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        tokenizer_type="HuggingFaceTokenizer",
        iteration=0,
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )
