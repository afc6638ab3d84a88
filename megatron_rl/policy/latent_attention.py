"""Multi-head latent attention (2405.04434) on packed sequences, with the rotation and the linear layer that Megatron's
own class lacks for it; the attention itself is Transformer Engine's, or `attention.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from megatron_rl.policy.packed_layout import packed_layout, rotate

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


class LatentAttention(MLASelfAttention):
    """Megatron's layer with its parameters, but rotated by the places of packed rows in their own sequences.

    Megatron cuts a micro-batch at the borders of its sequences, in every layer, and fails on rows behind the last one.

    Args:
        inv_freq: fp32 [qk_rope_head_dim / 2], the rotary frequencies.
        rotary_scale: what rotated features are multiplied by.
    """

    def __init__(self, *args: Any, inv_freq: Tensor, rotary_scale: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inv_freq = inv_freq
        self.rotary_scale = rotary_scale

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys [T, heads, qk_head_dim] and values [T, heads, v_head_dim] of this tensor-parallel rank's heads.

        With sequence parallelism `hidden_states` are this rank's rows; T are those of all its tensor-parallel ranks.
        Also returned are the latents that queries, and keys and values, were made from.
        """
        assert packed_seq_params is not None
        config, hidden = self.config, hidden_states.squeeze(1)
        latent, key_rotated = self.linear_kv_down_proj(hidden)[0].split(
            [config.kv_lora_rank, config.qk_pos_emb_head_dim], -1
        )
        latent = self.kv_layernorm(latent)
        if config.sequence_parallel:
            key_rotated = gather_from_sequence_parallel_region(key_rotated, group=self.tp_group)
        query, query_latent = self._queries(hidden)
        both = self._heads(self.linear_kv_up_proj(latent)[0])
        key, value = both.split([config.qk_head_dim, config.v_head_dim], -1)
        query_plain, query_rotated = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
        cos, sin = self._rotation(packed_seq_params, query)
        query = torch.cat([query_plain, _turn_pairs(query_rotated, cos, sin)], -1)
        shared = _turn_pairs(key_rotated.unsqueeze(1), cos, sin).expand(-1, query.size(1), -1)
        return query, torch.cat([key, shared], -1), value.contiguous(), query_latent, latent

    def _queries(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.q_lora_rank is None:
            return self._heads(self.linear_q_proj(hidden)[0]), hidden
        latent = self.q_layernorm(self.linear_q_down_proj(hidden)[0])
        return self._heads(self.linear_q_up_proj(latent)[0]), latent

    def _heads(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (self.num_attention_heads_per_partition, -1))

    def _rotation(self, packed: PackedSeqParams, query: Tensor) -> tuple[Tensor, Tensor]:
        context = self.pg_collection.cp
        layout = packed_layout(packed, query.size(0), context.size(), context.rank())
        cos, sin = layout.rotation(self.inv_freq, query.dtype)
        return (cos, sin) if self.rotary_scale == 1 else (cos * self.rotary_scale, sin * self.rotary_scale)


def _turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbours (2i, 2i + 1) of `[T, heads, features]`; the first of all pairs come first in the result."""
    return rotate(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)


class DuplicatedLinear(torch.nn.Module):
    """What Megatron's latent attention asks of Transformer Engine: a linear layer that every rank holds as a whole.

    With sequence parallelism each rank sees other rows, so that its weight's gradient is summed over the ranks.
    """

    def __init__(
        self, input_size: int, output_size: int, *, parallel_mode: str, config: Any, init_method: Any, **_: Any
    ) -> None:
        super().__init__()
        assert parallel_mode == "duplicated"
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """`[..., input_size]` -> `[..., output_size]`, and no bias."""
        return F.linear(x, self.weight), None
