"""One pass through the modules of a transformers model; where keys and values live, and who sees them, is passed in.

Qwen2, Qwen3, Llama, Mistral, Mixtral and GLM-4-MoE share their layout, so their layers are driven directly: no cache
object, mask builder or output class of transformers stands in the decoding loop, and tests hold the result to its full
forward. The attention of DeepSeek-V3 is brought to the same terms by `latent_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from megatron_rl.config.hf_config import EMBEDDED_MODEL_TYPES

from .experts import has_experts, mix_experts
from .latent_attention import Rotate, project_latent, without_padding

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, queries [B, Hq, S, D], keys [B, Hkv, S, D], values) -> [B, S, Hq * D]."""

Routed = Callable[[int, torch.Tensor], None]
"""(which of the MoE layers, experts [B, S, top_k]): told where each token went."""


def ignore_routes(layer: int, experts: torch.Tensor) -> None:
    """Where nobody wants to know."""


class ForwardPass:
    """The model as three steps: hidden states, logits, and the attention that the caller supplies.

    Raises:
        ValueError: the architecture is not one whose layers can be driven like this.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        if config.model_type not in EMBEDDED_MODEL_TYPES:
            raise ValueError(
                f"model_type {config.model_type!r}: the embedded engine serves {', '.join(EMBEDDED_MODEL_TYPES)}"
            )
        if getattr(config, "sliding_window", None) or "sliding_attention" in (
            getattr(config, "layer_types", None) or ()
        ):
            raise ValueError("the model uses sliding-window attention, which the embedded engine does not")
        self.model = model
        self.layers = list(model.model.layers)
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.value_dim: int | None = None
        """Features of a value where they are fewer than those of a key."""
        if config.model_type == "deepseek_v3":
            self.num_kv_heads = self.num_heads
            self.head_dim, self.value_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        self.vocab_size: int = config.vocab_size
        self.dtype: torch.dtype = model.dtype
        self.moe_layers = [index for index, layer in enumerate(self.layers) if has_experts(layer.mlp)]
        """Layers, from 0, whose MLP is a mixture of experts."""
        self.top_k: int = config.num_experts_per_tok if self.moe_layers else 0
        self.fixed_shapes = False
        """Whether kernels must run at shapes that no token decides."""

    def hidden_states(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, routed: Routed = ignore_routes
    ) -> torch.Tensor:
        """tokens, positions int64 [B, S] -> [B, S, hidden], after the final norm."""
        decoder = self.model.model
        hidden = decoder.embed_tokens(tokens)
        cos, sin = (table.unsqueeze(1) for table in decoder.rotary_emb(hidden, positions))
        place = {layer: number for number, layer in enumerate(self.moe_layers)}
        for index, layer in enumerate(self.layers):
            project = self._project if self.value_dim is None else project_latent
            states = project(layer.self_attn, layer.input_layernorm(hidden), partial(_rotate, cos=cos, sin=sin))
            attended = attend(index, *states)
            if self.value_dim is not None:
                attended = without_padding(attended, self.num_heads, self.value_dim)
            hidden = hidden + layer.self_attn.o_proj(attended)
            normed = layer.post_attention_layernorm(hidden)
            if index in place:
                outputs, experts = mix_experts(layer.mlp, normed, self.fixed_shapes)
                routed(place[index], experts)
            else:
                outputs = layer.mlp(normed)
            hidden = hidden + outputs
        return decoder.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., V]."""
        return self.model.lm_head(hidden)

    def _project(
        self, attention: Any, hidden: torch.Tensor, rotate: Rotate
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        queries = attention.q_proj(hidden).view(shape)
        keys = attention.k_proj(hidden).view(shape)
        if hasattr(attention, "q_norm"):  # Qwen3 and GLM-4-MoE normalise each head before rotating it
            queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        values = attention.v_proj(hidden).view(shape)
        return rotate(queries.transpose(1, 2)), rotate(keys.transpose(1, 2)), values.transpose(1, 2)


def causal_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of sequences that start at position 0, right-padded: [B, H, S, D] -> [B, S, Hq * D].

    Padding needs no mask: real tokens stand before it and causality hides it from them.
    """
    out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


def masked_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attention to a cache: queries [B, Hq, S, D], keys [B, Hkv, L, D], mask [1 or B, 1, S, L] -> [B, S, Hq * D].

    The query heads that share a key head are folded into the query length: keys are read once and never repeated.
    """
    batch, num_heads, length, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    folded = queries.reshape(batch, num_kv_heads, group * length, head_dim)
    if length > 1:
        mask = mask.repeat(1, 1, group, 1)
    out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    return out.reshape(batch, num_heads, length, head_dim).transpose(1, 2).flatten(2)


def visible_up_to(positions: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask: a query at `positions` int64 [B, S] sees cache entries 0 .. position; [B, 1, S, length]."""
    hidden = torch.arange(length) > positions[:, None, :, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, in the layout of Hugging Face checkpoints: the two halves of a head are the two coordinates.

    With fewer angles than features only the first of these are rotated.
    """
    size = cos.size(-1)
    rotated, rest = states[..., :size], states[..., size:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, rest), dim=-1) if rest.size(-1) else rotated
