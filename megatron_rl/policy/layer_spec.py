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
LATENT_EXCHANGES = PACKED_EXCHANGES | {"p2p": (2, 6), "a2a": (2, 16)}
"""Those that do so with values of another size than keys (latent attention), rightly."""


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
        f"{' of latent attention' if latent else ''} from {needed} on, and {found} is installed; upgrade it"
        f"{', or use p2p' if exchange != 'p2p' else ''}"
    )


def block_spec(config: TransformerConfig, inv_freq: Tensor, vp_stage: int | None, rotary_scale: float = 1.0) -> Any:
    """The spec of this pipeline stage's decoder block (of its virtual stage `vp_stage`).

    Args:
        config: Megatron's config of the whole model.
        inv_freq: fp32, the rotary frequencies, for attention that rotates by itself.
        vp_stage: virtual stage, None without interleaving.
        rotary_scale: what latent attention multiplies rotated features by.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from megatron_rl.policy.router import FrozenBiasRouter

    with_te = has_transformer_engine()
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=with_te, normalization=config.normalization, vp_stage=vp_stage
    )
    if not with_te:
        _use_own_modules(block, inv_freq)
    for layer in block.layer_specs:
        if _has_experts(layer):
            layer.submodules.mlp.submodules.router = FrozenBiasRouter
        if config.multi_latent_attention:
            _use_latent_attention(layer, inv_freq, rotary_scale)
    return block


def _use_own_modules(block: Any, inv_freq: Tensor) -> None:
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_rl.policy.attention import PackedAttention
    from megatron_rl.policy.norm import RMSNorm

    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        if _has_experts(layer):
            # In checkpoints, too, this norm is fused with a dense MLP only.
            layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = ModuleSpec(module=PackedAttention, params={"inv_freq": inv_freq})
        for norm in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if getattr(attention, norm, None) not in (None, IdentityOp):
                setattr(attention, norm, RMSNorm)


def _has_experts(layer: Any) -> bool:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return issubclass(layer.submodules.mlp.module, MoELayer)


def _use_latent_attention(layer: Any, inv_freq: Tensor, rotary_scale: float) -> None:
    from megatron_rl.policy.latent_attention import DuplicatedLinear, LatentAttention

    spec = layer.submodules.self_attention
    spec.module = LatentAttention
    spec.params = {**spec.params, "inv_freq": inv_freq, "rotary_scale": rotary_scale}
    if has_transformer_engine():
        return
    spec.submodules.linear_q_down_proj = spec.submodules.linear_kv_down_proj = DuplicatedLinear
    spec.submodules.core_attention.params["inv_freq"] = None  # what comes there is rotated
    names = {
        f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_" for x in ("q", "kv")
    } | ({} if _has_experts(layer) else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"})
    layer.submodules.sharded_state_dict_keys_map = names
