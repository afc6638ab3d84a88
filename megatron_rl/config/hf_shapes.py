"""Shapes of a model's experts and of its latent attention, as `hf_config` reads them; plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
