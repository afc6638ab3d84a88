"""Turns a Hugging Face config into the model (`gpt.py`) of this rank; weights are loaded by `weights.load`."""

from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from megatron_rl.config.shards import stage_layers
from megatron_rl.policy import upstream_fixes
from megatron_rl.policy.distributed import device
from megatron_rl.policy.layer_spec import block_spec, exchange_problem, has_transformer_engine

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from torch import Tensor

    from megatron_rl.config import HfConfig
    from megatron_rl.config.model import ModelConfig
    from megatron_rl.config.parallel import ParallelConfig
    from megatron_rl.policy.gpt import PolicyModel


class ModelError(ValueError):
    """The model cannot be built in this layout; the message says which key of which file or section is the reason."""


def build_model(hf: HfConfig, model_cfg: ModelConfig, parallel_cfg: ParallelConfig) -> list[PolicyModel]:
    """Build this rank's part of the model: one chunk, or one per virtual pipeline stage.

    `policy.distributed.initialize` must have run. The chunks are bare (no data-parallel wrapper), on this rank's
    device, in `model_cfg.dtype`, with weights that are not set to anything: load some.

    Raises:
        ModelError: the layout is not supported.
    """
    from megatron.core import parallel_state

    if hf.moe is not None:
        upstream_fixes.apply_to_experts()
    if hf.mla is not None:
        upstream_fixes.apply_to_latent_attention()
    config = transformer_config(hf, model_cfg, parallel_cfg)
    stages = parallel_cfg.virtual_pipeline_model_parallel_size
    chunks = []
    for vp_stage in range(stages) if stages else [None]:
        chunk = _build_chunk(
            hf,
            config,
            padded_vocab_size(hf.vocab_size, model_cfg, parallel_cfg),
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            vp_stage=vp_stage,
        )
        chunks.append(chunk)
    return chunks


def _build_chunk(hf: HfConfig, config: TransformerConfig, vocab_size: int, **stage: Any) -> PolicyModel:
    from megatron_rl.policy.gpt import PolicyModel

    inv_freq = rotary_frequencies(hf).to(device())
    with_te = has_transformer_engine()
    model = PolicyModel(
        config,
        block_spec(config, inv_freq, stage["vp_stage"], rotary_scale(hf) if hf.mla else 1.0),
        vocab_size=vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        # Latent attention, and all without Transformer Engine, rotates by itself.
        position_embedding_type="rope" if with_te and hf.mla is None else "none",
        rotary_percent=hf.rotary_percent,
        rotary_base=int(hf.rope_theta),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        **stage,
    )
    if with_te and hf.mla is None:
        model.rotary_pos_emb.inv_freq = inv_freq  # Megatron fixes all scaling parameters but the factor
    return model.to(device())


def padded_vocab_size(vocab_size: int, model_cfg: ModelConfig, parallel_cfg: ParallelConfig) -> int:
    """The smallest multiple of `make_vocab_size_divisible_by * TP` that holds `vocab_size` entries."""
    multiple = model_cfg.make_vocab_size_divisible_by * parallel_cfg.tensor_model_parallel_size
    return math.ceil(vocab_size / multiple) * multiple


def transformer_config(hf: HfConfig, model_cfg: ModelConfig, parallel_cfg: ParallelConfig) -> TransformerConfig:
    """Megatron's config of the whole model.

    `calculate_per_token_loss` makes Megatron leave the loss alone: gradients are plain sums over micro-batches and
    data-parallel ranks, and every normaliser is in the loss weights (one global denominator per optimizer step).
    """
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    _check_layout(hf, parallel_cfg)
    dtype = getattr(torch, model_cfg.dtype)
    return (MLATransformerConfig if hf.mla else TransformerConfig)(
        num_layers=hf.num_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.ffn_hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_attention_heads if hf.mla else hf.num_query_groups,
        kv_channels=hf.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        qk_layernorm=hf.qk_norm or hf.mla is not None,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        softmax_scale=None if hf.mla else attention_scale(hf),
        # `weights.load` sets every parameter. Not perform_initialization=False: Megatron would then not mark which
        # parameters are split over tensor-parallel ranks, and count only the first rank's part in the gradient norm.
        init_method=_leave_unset,
        output_layer_init_method=_leave_unset,
        embedding_init_method=_leave_unset,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,  # micro-batches are packed to a token budget and differ in length
        moe_token_dispatcher_type="alltoall",  # the default refuses variable_seq_lengths, in dense models too
        **expert_options(hf),
        **_latent_options(hf),
        **_parallel_options(parallel_cfg),
        **_recompute_options(parallel_cfg),
        **_kernel_options(hf),
    )


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


def _latent_options(hf: HfConfig) -> dict[str, Any]:
    if hf.mla is None:
        return {}
    scaling = hf.rope_scaling or {}
    return {
        "q_lora_rank": hf.mla.q_lora_rank,
        "kv_lora_rank": hf.mla.kv_lora_rank,
        "qk_head_dim": hf.mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.mla.qk_rope_head_dim,
        "v_head_dim": hf.mla.v_head_dim,
        "rope_type": "rope",  # it rotates by itself; these two scale the softmax
        "rotary_scaling_factor": scaling.get("factor") or 1.0,
        "mscale_all_dim": scaling.get("mscale_all_dim") or 0.0,
    }


def _leave_unset(weight: Tensor) -> Tensor:
    return weight


def _check_layout(hf: HfConfig, parallel_cfg: ParallelConfig) -> None:
    tp = parallel_cfg.tensor_model_parallel_size
    if parallel_cfg.context_parallel_size > 1 and has_transformer_engine():
        from megatron.core.utils import get_te_version

        problem = exchange_problem(
            parallel_cfg.context_parallel_exchange, get_te_version().release, latent=hf.mla is not None
        )
        if problem:
            raise ModelError(problem)
    counts = {"num_attention_heads": hf.num_attention_heads, "intermediate_size": hf.ffn_hidden_size}
    if hf.mla is None:
        counts["num_key_value_heads"] = hf.num_query_groups
        counts["(num_attention_heads + 2 num_key_value_heads) * head_dim"] = hf.qkv_rows
    for name, count in counts.items():
        # With more ranks than query groups several ranks share one, and each holds a part of its rows.
        is_shared_group = name == "num_key_value_heads" and tp % count == 0
        if count % tp and not is_shared_group:
            raise ModelError(
                f"parallel.tensor_model_parallel_size={tp} does not divide the model's {name}={count}; "
                "choose a divisor, or use pipeline_model_parallel_size"
            )
    try:
        stage_layers(hf.num_layers, parallel_cfg)
    except ValueError as error:
        raise ModelError(str(error)) from error


def _parallel_options(parallel_cfg: ParallelConfig) -> dict[str, Any]:
    interleaved = parallel_cfg.virtual_pipeline_model_parallel_size is not None
    return {
        **parallel_cfg.group_sizes,
        "num_layers_in_first_pipeline_stage": parallel_cfg.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": parallel_cfg.num_layers_in_last_pipeline_stage,
        "cp_comm_type": parallel_cfg.context_parallel_exchange,  # Transformer Engine's name for it
        "sequence_parallel": parallel_cfg.sequence_parallel,
        "use_cpu_initialization": not torch.cuda.is_available(),
        # With interleaving at PP 2, both directions go to the same peer and batched sends are matched by their order:
        # silently wrong. Separate sends are right, but over gloo the buffer of a pending send must live on.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "deallocate_pipeline_outputs": torch.cuda.is_available() or not interleaved,
    }


def _recompute_options(parallel_cfg: ParallelConfig) -> dict[str, Any]:
    if parallel_cfg.recompute == "none":
        return {}
    if parallel_cfg.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _kernel_options(hf: HfConfig) -> dict[str, bool]:
    """Fused kernels where they exist. On CPU Megatron's are torch.compile, which costs seconds at the first step."""
    cuda, te = torch.cuda.is_available(), has_transformer_engine()
    return {
        "bias_activation_fusion": cuda,
        "bias_dropout_fusion": cuda,
        "masked_softmax_fusion": False,  # only Megatron's own core attention would use it
        "persist_layer_norm": False,
        "apply_rope_fusion": te and hf.mla is None,
        "gradient_accumulation_fusion": te and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        # Megatron's fused cross entropy rounds its gradient to bf16; the loss here is our own anyway.
        "cross_entropy_loss_fusion": False,
    }


def attention_scale(hf: HfConfig) -> float | None:
    """What scores are multiplied by before softmax where it is not head_dim ** -0.5.

    Rotated queries and keys are stretched by the same factor, which is its square on their product.
    """
    scale = rotary_scale(hf)
    return None if scale == 1 else scale**2 / math.sqrt(hf.head_dim)


def rotary_scale(hf: HfConfig) -> float:
    """What rotated features are multiplied by: YaRN (2309.00071) stretches them."""
    scaling = hf.rope_scaling or {}
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        return 1.0
    factor = scaling.get("attention_factor")
    if factor is None:
        growth = 0.1 * math.log(max(scaling["factor"], 1.0))
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        factor = (mscale * growth + 1) / (mscale_all * growth + 1) if mscale and mscale_all else growth + 1
    return float(factor)


def rotary_frequencies(hf: HfConfig) -> Tensor:
    """Rotary frequencies per pair of features, fp32 [rotary_dim / 2], with the model's scaling applied.

    `default` is theta ** (-2i / rotary_dim) (2104.09864), `linear` divides it by `factor`, `llama3` divides long
    wavelengths only, with a smooth passage between `low_freq_factor` and `high_freq_factor`; so does `yarn`
    (2309.00071), whose passage is linear in the index of the pair.
    `read_hf_config` admits no others.
    """
    exponent = torch.arange(0, hf.rotary_dim, 2, dtype=torch.int64).float() / hf.rotary_dim
    inv_freq = 1.0 / (hf.rope_theta**exponent)
    scaling = hf.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return inv_freq
    if kind == "linear":
        return inv_freq / scaling["factor"]
    if kind == "yarn":
        return _yarn_frequencies(inv_freq, hf, scaling)
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq


def _yarn_frequencies(inv_freq: Tensor, hf: HfConfig, scaling: dict[str, Any]) -> Tensor:
    def pair_with(turns: float) -> float:
        """Index, not whole, of the pair that turns so often over the length that the model was first trained on."""
        length = scaling["original_max_position_embeddings"]
        return hf.rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(hf.rope_theta))

    low, high = pair_with(scaling.get("beta_fast") or 32), pair_with(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, hf.rotary_dim - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(hf.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inv_freq * (1 - stretched) + inv_freq / scaling["factor"] * stretched
