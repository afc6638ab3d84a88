"""Chooses Megatron's layer spec: Transformer Engine's when it can run, else the local one with our own modules."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from torch import Tensor


PACKED_EXCHANGES = {"p2p": (1, 10), "a2a": (2, 11), "all_gather": (2, 18)}
"""Versions of Transformer Engine that attend so to packed sequences dealt over context-parallel ranks; read in its
sources, not tried."""
LATENT_EXCHANGES = PACKED_EXCHANGES | {"a2a": (2, 16)}
"""Those that do so with values of another size than keys (latent attention)."""


@functools.cache
def has_transformer_engine() -> bool:
    """True when Transformer Engine imports and there is a GPU to run it on."""
    if not torch.cuda.is_available():
        return False
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ImportError:
        return False
    return True


def exchange_problem(exchange: str, version: tuple[int, ...], latent: bool) -> str | None:
    """Why Transformer Engine of this version cannot do `parallel.context_parallel_exchange`; None when it can."""
    since = (LATENT_EXCHANGES if latent else PACKED_EXCHANGES)[exchange]
    if version >= since:
        return None
    needed, found = (".".join(map(str, numbers)) for numbers in (since, version))
    return (
        f"parallel.context_parallel_exchange={exchange}: Transformer Engine has it for packed sequences"
        f"{' of latent attention' if latent else ''} from {needed} on, and {found} is installed; upgrade it, or use p2p"
    )


def block_spec(config: TransformerConfig, inv_freq: Tensor, vp_stage: int | None) -> Any:
    """The spec of this pipeline stage's decoder block (of its virtual stage `vp_stage`).

    Args:
        config: Megatron's config of the whole model.
        inv_freq: fp32 [head_dim / 2], for the local spec, whose attention rotates by itself.
        vp_stage: virtual stage, None without interleaving.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    if has_transformer_engine():
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    return _with_own_modules(block, inv_freq)


def _with_own_modules(block: Any, inv_freq: Tensor) -> Any:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_rl.policy.attention import PackedAttention
    from megatron_rl.policy.norm import RMSNorm

    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        if issubclass(layer.submodules.mlp.module, MoELayer):
            # In checkpoints, too, this norm is fused with a dense MLP only.
            layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = ModuleSpec(module=PackedAttention, params={"inv_freq": inv_freq})
        if _has_qk_norm(attention):
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return block


def _has_qk_norm(attention: Any) -> bool:
    """Whether the spec of an attention layer norms its queries and keys."""
    from megatron.core.transformer.identity_op import IdentityOp

    return attention.q_layernorm is not None and attention.q_layernorm is not IdentityOp
