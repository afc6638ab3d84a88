"""Reads a model's experts and its latent attention from config.json; what is common to all models is in `hf_config`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .hf_numbers import given, positive
from .hf_shapes import MlaShape, MoeShape

LATENT = ("deepseek_v2", "deepseek_v3")
"""Model types with multi-head latent attention."""


def moe_of(raw: dict[str, Any], num_layers: int) -> MoeShape | None:
    """The experts; None for a dense model.

    Raises:
        KeyError, ValueError: a number is missing, no number, or does not fit the others.
    """
    reader = _READERS.get(raw["model_type"])
    if reader is None:
        return None
    moe = reader(raw, num_layers)
    if moe.top_k > moe.num_experts:
        raise ValueError(f"num_experts_per_tok={moe.top_k} of {moe.num_experts} experts")
    groups, top_groups = moe.num_groups or 1, moe.top_groups or 1
    if moe.num_experts % groups or top_groups > groups or moe.top_k > moe.num_experts // groups * top_groups:
        raise ValueError(
            f"n_group={groups}, topk_group={top_groups} do not fit {moe.top_k} chosen of {moe.num_experts} experts"
        )
    if moe.top_k == 1 and moe.normalise_top_k:
        raise ValueError("num_experts_per_tok=1 with norm_topk_prob=true: the one expert's weight is always 1")
    return moe if len(moe.dense_layers) < num_layers else None


def mla_of(raw: dict[str, Any]) -> MlaShape | None:
    """The latent attention; None where there is none. Raises KeyError and ValueError as `moe_of` does."""
    if raw["model_type"] not in LATENT:
        return None
    return MlaShape(
        q_lora_rank=None if raw.get("q_lora_rank") is None else positive(raw, "q_lora_rank"),
        kv_lora_rank=positive(raw, "kv_lora_rank"),
        qk_nope_head_dim=positive(raw, "qk_nope_head_dim"),
        qk_rope_head_dim=positive(raw, "qk_rope_head_dim"),
        v_head_dim=positive(raw, "v_head_dim"),
    )


def not_computed(raw: dict[str, Any]) -> str | None:
    """The first key about experts whose value asks for something else than is computed here."""
    if raw["model_type"] not in LATENT:
        return None
    third = raw["model_type"] == "deepseek_v3"
    for key, value in (
        ("scoring_func", "sigmoid" if third else "softmax"),
        ("topk_method", "noaux_tc" if third else "greedy"),
    ):
        if raw.get(key, value) != value:
            return f"{key}={raw[key]!r} is not supported; only {value}"
    if raw.get("rope_interleave", True) is not True:
        return "rope_interleave=false is not supported"
    if not third:
        return "norm_topk_prob=true is not supported with softmax scores" if raw.get("norm_topk_prob") else None
    top_k, groups, top_groups = (raw.get(key) or 1 for key in ("num_experts_per_tok", "n_group", "topk_group"))
    if groups > 1 and top_k != 2 * top_groups:
        # The score of a group is the sum of its best two; Megatron takes the best top_k / topk_group.
        return f"num_experts_per_tok={top_k} with topk_group={top_groups} is not supported; only twice topk_group"
    if top_k > 1 and not raw.get("norm_topk_prob", True):
        return "norm_topk_prob=false is not supported with sigmoid scores"
    return None


def _qwen3(raw: dict[str, Any], num_layers: int) -> MoeShape:
    step = positive({"decoder_sparse_step": 1, **given(raw)}, "decoder_sparse_step")
    named = set(raw.get("mlp_only_layers") or ())
    return MoeShape(
        num_experts=_experts(raw),
        top_k=positive(raw, "num_experts_per_tok"),
        ffn_hidden_size=positive(raw, "moe_intermediate_size"),
        dense_layers=tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % step),
        normalise_top_k=bool(raw.get("norm_topk_prob", False)),
    )


def _mixtral(raw: dict[str, Any], num_layers: int) -> MoeShape:
    return MoeShape(
        num_experts=_experts(raw),
        top_k=positive(raw, "num_experts_per_tok"),
        ffn_hidden_size=positive(raw, "intermediate_size"),
    )


def _deepseek_v2(raw: dict[str, Any], num_layers: int) -> MoeShape:
    size, step = positive(raw, "moe_intermediate_size"), positive({"moe_layer_freq": 1, **given(raw)}, "moe_layer_freq")
    first = raw.get("first_k_dense_replace") or 0
    return MoeShape(
        num_experts=positive(raw, "n_routed_experts"),
        top_k=positive(raw, "num_experts_per_tok"),
        ffn_hidden_size=size,
        shared_ffn_hidden_size=size * (raw.get("n_shared_experts") or 0),
        dense_layers=tuple(layer for layer in range(num_layers) if layer < first or layer % step),
        normalise_top_k=False,
        scaling_factor=positive({"routed_scaling_factor": 1.0, **given(raw)}, "routed_scaling_factor", float),
    )


def _deepseek_v3(raw: dict[str, Any], num_layers: int) -> MoeShape:
    groups = positive({"n_group": 1, **given(raw)}, "n_group")
    return replace(
        _deepseek_v2(raw, num_layers),
        score_function="sigmoid",
        normalise_top_k=True,
        num_groups=groups if groups > 1 else None,
        top_groups=positive(raw, "topk_group") if groups > 1 else None,
        expert_bias=True,
    )


def _experts(raw: dict[str, Any]) -> int:
    """Under the name of published configs, or the one that transformers 5 writes."""
    key = "num_experts" if raw.get("num_experts") is not None else "num_local_experts"
    return positive(raw, key)


_READERS: dict[str, Callable[[dict[str, Any], int], MoeShape]] = {
    "qwen3_moe": _qwen3,
    "mixtral": _mixtral,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}
