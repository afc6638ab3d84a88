"""Shapes of a model's experts and of its latent attention, from checked keys of config.json; keys: `hf_numbers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from .hf_numbers import Unsupported

LATENT = ("deepseek_v2", "deepseek_v3")
"""Model types with multi-head latent attention."""


@dataclass(frozen=True)
class MoeShape:
    """Experts of a mixture-of-experts model, the same in all its MoE layers.

    Attributes:
        num_experts: routed experts of a layer.
        top_k: experts of a token.
        ffn_hidden_size: features of one expert.
        shared_ffn_hidden_size: features of the experts that see every token, taken together; 0 = none.
        dense_layers: layers, from 0, that have an ordinary MLP instead.
        score_function: of the router's logits.
        normalise_top_k: whether the scores of a token's experts are divided by their sum.
        scaling_factor: what these weights are multiplied by.
        num_groups, top_groups: experts are chosen from the `top_groups` best of `num_groups` groups; None = no groups.
        expert_bias: whether a bias is added to scores for choosing only.
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    dense_layers: tuple[int, ...] = ()
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    normalise_top_k: bool = True
    scaling_factor: float = 1.0
    num_groups: int | None = None
    top_groups: int | None = None
    expert_bias: bool = False


@dataclass(frozen=True)
class MlaShape:
    """Multi-head latent attention (2405.04434); counts of features, of one head where it says head.

    Attributes:
        q_lora_rank: latent of the queries; None = queries are projected at once.
        kv_lora_rank: latent of keys and values.
        qk_nope_head_dim, qk_rope_head_dim: of a head's query and key, without and with rotation.
        v_head_dim: of a head's value.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """Of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


def moe_of(model_type: str, values: dict[str, Any]) -> MoeShape | None:
    """The experts, from the keys that `values_of` gives; None for a dense model.

    Raises:
        KeyError, ValueError: a number is missing, or does not fit the others.
    """
    reader = _READERS.get(model_type)
    if reader is None:
        return None
    num_layers = values["num_hidden_layers"]
    moe = reader(values, num_layers)
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


def mla_of(model_type: str, values: dict[str, Any]) -> MlaShape | None:
    """The latent attention; None where there is none. Raises KeyError where a number is missing."""
    if model_type not in LATENT:
        return None
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return MlaShape(**{name: values[name] for name in names})


def _qwen3(values: dict[str, Any], num_layers: int) -> MoeShape:
    step, named = values["decoder_sparse_step"], set(values["mlp_only_layers"] or ())
    if named and max(named) >= num_layers:
        raise ValueError(f"mlp_only_layers: there is no layer {max(named)}; layers are from 0 to {num_layers - 1}")
    return MoeShape(
        num_experts=_experts(values, "num_experts", "num_local_experts"),
        top_k=values["num_experts_per_tok"],
        ffn_hidden_size=values["moe_intermediate_size"],
        dense_layers=tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % step),
        normalise_top_k=values["norm_topk_prob"],
    )


def _mixtral(values: dict[str, Any], num_layers: int) -> MoeShape:
    return MoeShape(
        num_experts=_experts(values, "num_local_experts", "num_experts"),
        top_k=values["num_experts_per_tok"],
        ffn_hidden_size=values["intermediate_size"],
    )


def _deepseek_v2(values: dict[str, Any], num_layers: int) -> MoeShape:
    size = values["moe_intermediate_size"]
    return MoeShape(
        num_experts=_experts(values, "n_routed_experts", "num_local_experts", "num_experts"),
        top_k=values["num_experts_per_tok"],
        ffn_hidden_size=size,
        shared_ffn_hidden_size=size * (values["n_shared_experts"] or 0),
        dense_layers=tuple(range(min(values["first_k_dense_replace"], num_layers))),
        normalise_top_k=False,
        scaling_factor=float(values["routed_scaling_factor"]),
    )


def _deepseek_v3(values: dict[str, Any], num_layers: int) -> MoeShape:
    top_k, groups, top_groups = values["num_experts_per_tok"], values["n_group"], values["topk_group"]
    if groups > 1 and top_k != 2 * top_groups:
        # The score of a group is the sum of its best two; Megatron takes the best top_k / topk_group.
        raise Unsupported(
            f"num_experts_per_tok={top_k} with topk_group={top_groups} is not supported; only twice topk_group"
        )
    if top_k > 1 and not values["norm_topk_prob"]:
        raise Unsupported("norm_topk_prob=false is not supported with sigmoid scores; only true")
    return replace(
        _deepseek_v2(values, num_layers),
        score_function="sigmoid",
        normalise_top_k=True,
        num_groups=groups if groups > 1 else None,
        top_groups=top_groups if groups > 1 else None,
        expert_bias=True,
    )


def _experts(values: dict[str, Any], *names: str) -> int:
    """Under the name of published configs, or one that transformers 5 writes."""
    given = {name: values[name] for name in names if name in values}
    if not given:
        raise KeyError(names[0])
    if len(set(given.values())) > 1:
        raise ValueError(" and ".join(f"{name}={value}" for name, value in given.items()) + " differ")
    return int(next(iter(given.values())))


_READERS: dict[str, Callable[[dict[str, Any], int], MoeShape]] = {
    "qwen3_moe": _qwen3,
    "mixtral": _mixtral,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _deepseek_v3,
}
