"""Core attention over packed sequences without Transformer Engine: rotary embedding and causal SDPA, nothing else.

Sequences are attended in right-padded batches (`packed_layout.py`). Right padding needs no mask: under causal attention
no real query sees a key behind it.

The rotation happens here and not in Megatron's attention layer because Megatron's own loops over sequences, twice in
every layer. With selective recompute it is recomputed too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_rl.policy.packed_layout import Bucket, packed_layout, pad, rotate, unpad

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


class PackedAttention(MegatronModule):
    """Megatron's core-attention slot: rotates queries and keys, then causal attention within each sequence.

    Args:
        inv_freq: fp32 [head_dim / 2], the rotary frequencies (`policy.model.rotary_frequencies`).

    The other arguments are what Megatron's specs pass to every core attention.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        *,
        inv_freq: Tensor,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.inv_freq = inv_freq  # not a buffer: it belongs to the architecture and not to a checkpoint
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [T, heads, head_dim], of this tensor-parallel rank.
            key, value: [T, groups, head_dim].
            attention_mask: must be None: the packing says who sees whom.
            packed_seq_params: `cu_seqlens_q` int32 [S + 1]; tokens behind its last entry get values without meaning.

        Returns:
            [T, heads * head_dim].

        Raises:
            ValueError: sequences are not packed.
        """
        if packed_seq_params is None or attention_mask is not None:
            raise ValueError("attention runs on packed sequences only: pass packed_seq_params and attention_mask=None")
        layout = packed_layout(packed_seq_params, query.size(0))
        cos, sin = layout.rotation(self.inv_freq, query.dtype)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if not layout.is_padded:
            return self._attend(query, key, value, layout.buckets[0])
        query, key, value = pad(query, layout), pad(key, layout), pad(value, layout)
        outputs = [self._attend(query[b.rows], key[b.rows], value[b.rows], b) for b in layout.buckets]
        return unpad(outputs[0] if len(outputs) == 1 else torch.cat(outputs), layout)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, bucket: Bucket) -> Tensor:
        """Rows of one bucket, [count * length, heads, head_dim] -> [count * length, heads * head_dim]."""
        q, k, v = (x.unflatten(0, (bucket.count, bucket.length)).transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            scale=self.scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        return out.transpose(1, 2).flatten(2).flatten(0, 1)
