"""Core attention over packed sequences without Transformer Engine: rotary embedding and causal SDPA, nothing else.

Packed means `thd`: the tokens of all sequences one after the other, `[T, heads, head_dim]`, with `cu_seqlens` telling
where each begins. A loop over sequences, which Megatron's own rotary code and a plain SDPA would need, costs more than
the arithmetic when hundreds of sequences are short. Here sequences of similar length are padded on the right into one
`[n, longest, heads, head_dim]` batch by one index, attended in one call and gathered back. Right padding needs no mask:
under causal attention no real query sees a key behind it.

The rotation happens here and not in Megatron's attention layer because this is the innermost place that knows the
packing; with selective recompute it is then recomputed too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

MAX_PADDING = 1.5
"""Sequences stay in one batch while padding makes it at most this many times its tokens; else they are bucketed."""


@dataclass(frozen=True)
class Bucket:
    """Sequences attended together: rows `begin` to `begin + count * length` of the padded tokens."""

    begin: int
    count: int
    length: int


class PackedLayout:
    """Where each token of a micro-batch stands: its position in its sequence and its slot in the padded batches.

    Built once per micro-batch from `cu_seqlens` and shared by all layers and by recomputation.

    Attributes:
        positions: int64 [T], 0 at the first token of every sequence.
        slots: int64 [T], row of each token among the padded tokens.
        sources: int64 [P], token of each padded row; a padding row repeats a token of its own sequence.
        padding: bool [P], True on padding rows.
        buckets: what to attend together; their rows partition the P padded ones.
    """

    def __init__(self, cu_seqlens: Tensor, num_tokens: int) -> None:
        bounds = cu_seqlens.to(device="cpu", dtype=torch.int64)
        if int(bounds[-1]) < num_tokens:  # tokens behind the last sequence: one more sequence, attended and ignored
            bounds = torch.cat([bounds, bounds.new_tensor([num_tokens])])
        starts, lengths = bounds[:-1], bounds.diff()
        starts, lengths = starts[lengths > 0], lengths[lengths > 0]
        device = cu_seqlens.device
        self.positions = (torch.arange(num_tokens) - starts.repeat_interleave(lengths)).to(device)
        self.buckets, sources, padding, slots = [], [], [], torch.empty(num_tokens, dtype=torch.int64)
        begin = 0
        for members in _group_by_length(lengths):
            count, length = len(members), int(lengths[members].max())
            column = torch.arange(length)
            real = column < lengths[members, None]
            tokens = starts[members, None] + column.minimum(lengths[members, None] - 1)
            slots[tokens[real]] = begin + torch.arange(count * length).view(count, length)[real]
            sources.append(tokens.flatten())
            padding.append(~real.flatten())
            self.buckets.append(Bucket(begin, count, length))
            begin += count * length
        self.slots = slots.to(device)
        self.sources = torch.cat(sources).to(device)
        self.padding = torch.cat(padding).to(device)
        self._rotations: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    @cached_property
    def is_padded(self) -> bool:
        """False when the padded tokens are the packed ones, in order: nothing needs to be moved."""
        return len(self.sources) != len(self.slots) or len(self.buckets) > 1

    def rotation(self, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, 1, head_dim / 2] of every token's angles, computed in fp32 and rounded to `dtype`."""
        key = (id(inv_freq), dtype)
        if key not in self._rotations:
            angles = self.positions.to(torch.float32)[:, None, None] * inv_freq
            self._rotations[key] = (angles.cos().to(dtype), angles.sin().to(dtype))
        return self._rotations[key]


def _group_by_length(lengths: Tensor) -> list[Tensor]:
    """Indices of the sequences to attend together: all, or by power of two when padding all to the longest wastes."""
    if len(lengths) * int(lengths.max()) <= MAX_PADDING * int(lengths.sum()):
        return [torch.arange(len(lengths))]
    power = (lengths - 1).clamp(min=1).log2().floor().to(torch.int64)
    return [(power == p).nonzero().flatten() for p in power.unique().tolist()]


def packed_layout(packed: PackedSeqParams, num_tokens: int) -> PackedLayout:
    """The layout of a micro-batch, kept on the object that all layers receive."""
    layout: PackedLayout | None = vars(packed).get("layout")
    if layout is None:
        layout = PackedLayout(packed.cu_seqlens_q, num_tokens)
        vars(packed)["layout"] = layout
    return layout


class _Rotate(torch.autograd.Function):
    """Rotary embedding (2104.09864) of `[..., head_dim]`: turns pairs (i, i + head_dim / 2) by their token's angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = cos.size(-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin, value=sign)
    return out


class _Pad(torch.autograd.Function):
    """Packed tokens [T, ...] -> padded rows [P, ...]; the gradient of a padding row is zero by construction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: PackedLayout) -> Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.layout.slots), None


class _Unpad(torch.autograd.Function):
    """Padded rows [P, ...] -> packed tokens [T, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: PackedLayout) -> Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        layout: PackedLayout = ctx.layout
        padded = grad.index_select(0, layout.sources)
        return padded.masked_fill_(layout.padding.view(-1, *[1] * (grad.dim() - 1)), 0), None


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
        """
        if packed_seq_params is None or attention_mask is not None:
            raise ValueError("attention runs on packed sequences only: pass packed_seq_params and attention_mask=None")
        layout = packed_layout(packed_seq_params, query.size(0))
        cos, sin = layout.rotation(self.inv_freq, query.dtype)
        query, key = _Rotate.apply(query, cos, sin), _Rotate.apply(key, cos, sin)
        if not layout.is_padded:
            return self._attend(query, key, value, layout.buckets[0])
        query, key, value = (_Pad.apply(x, layout) for x in (query, key, value))
        outputs = []
        for bucket in layout.buckets:
            rows = slice(bucket.begin, bucket.begin + bucket.count * bucket.length)
            outputs.append(self._attend(query[rows], key[rows], value[rows], bucket))
        return _Unpad.apply(outputs[0] if len(outputs) == 1 else torch.cat(outputs), layout)

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
