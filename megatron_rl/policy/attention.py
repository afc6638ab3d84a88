"""Core attention over packed sequences without Transformer Engine: rotary embedding and causal SDPA, nothing else.

Sequences are attended in right-padded batches (`packed_layout.py`). Right padding needs no mask: under causal attention
no real query sees a key behind it. With context parallelism keys and values of all ranks are gathered, and each rank
attends from the two chunks of every sequence that are its own, with a mask by their places in the whole sequence.

The rotation happens here and not in Megatron's attention layer because Megatron's own loops over sequences, twice in
every layer. With selective recompute it is recomputed too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_rl.policy.packed_layout import PackedLayout, packed_layout, pad, rotate, unpad

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


class PackedAttention(MegatronModule):
    """Megatron's core-attention slot: rotates queries and keys, then causal attention within each sequence.

    Args:
        inv_freq: fp32 [rotary_dim / 2], the rotary frequencies (`policy.model.rotary_frequencies`), of the first
            `rotary_dim` features of a head; None: queries and keys come rotated.
        pg_collection: Megatron's process groups, of which the context-parallel one is read.

    The other arguments are what Megatron's specs pass to every core attention.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *,
        softmax_scale: float | None = None,
        inv_freq: Tensor | None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.inv_freq = inv_freq  # not a buffer: it belongs to the architecture and not to a checkpoint
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.context_group = None if pg_collection is None else pg_collection.cp

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
            query: [T, heads, head_dim], of this tensor- and context-parallel rank.
            key: [T, groups, head_dim].
            value: [T, groups, value_dim].
            attention_mask: None: the packing says who sees whom.
            packed_seq_params: `cu_seqlens_q` int32 [S + 1], of all context-parallel ranks together; without them,
                tokens behind its last entry get values without meaning.

        Returns:
            [T, heads * value_dim].
        """
        assert packed_seq_params is not None
        size, rank = (1, 0) if self.context_group is None else (self.context_group.size(), self.context_group.rank())
        layout = packed_layout(packed_seq_params, query.size(0), size, rank)
        if self.inv_freq is not None:
            cos, sin = layout.rotation(self.inv_freq, query.dtype)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if size > 1:
            key, value = self._of_all_ranks(key, value)
        if layout.is_padded:
            query = pad(query, layout.queries)
        if layout.is_padded or size > 1:
            key, value = pad(key, layout.keys), pad(value, layout.keys)
        attend = self._attend if size == 1 else self._attend_from_chunks
        outputs = [attend(query, key, value, layout, number) for number in range(len(layout.buckets))]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return unpad(output, layout.queries) if layout.is_padded else output

    def _of_all_ranks(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all context-parallel ranks, one after the other; gradients are summed back to theirs."""
        sizes = [key[0].numel(), value[0].numel()]
        both = torch.cat([key.flatten(1), value.flatten(1)], 1)
        gathered = gather_from_sequence_parallel_region(both, group=self.context_group)
        keys, values = gathered.split(sizes, 1)
        return keys.unflatten(1, key.shape[1:]), values.unflatten(1, value.shape[1:])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, number: int) -> Tensor:
        """From padded rows [*, heads, dim] to those of one bucket, [count * length, heads * value_dim]."""
        bucket = layout.buckets[number]
        q, k, v = (x[bucket.rows()].unflatten(0, (bucket.count, bucket.length)) for x in (query, key, value))
        return self._sdpa(q, k, v, None).flatten(2).flatten(0, 1)

    def _attend_from_chunks(
        self, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, number: int
    ) -> Tensor:
        """The same with this rank's two chunks of every sequence, [count * length / CP, heads * value_dim].

        Each chunk meets the keys up to its own end alone: together as many for every rank.
        """
        bucket, size, rank = layout.buckets[number], layout.context_size, layout.context_rank
        rows = bucket.length // (2 * size)
        q = query[bucket.rows(size)].unflatten(0, (bucket.count, 2, rows))
        k, v = (x[bucket.rows()].unflatten(0, (bucket.count, bucket.length)) for x in (key, value))
        outputs = []
        for part, chunk in enumerate((rank, 2 * size - 1 - rank)):
            seen = (chunk + 1) * rows
            outputs.append(self._sdpa(q[:, part], k[:, :seen], v[:, :seen], layout.visible(number, chunk)))
        return torch.stack(outputs, 1).flatten(3).flatten(0, 2)

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[count, rows, heads, dim] each -> [count, rows, heads, value_dim]; without a mask causal."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        return out.transpose(1, 2)
