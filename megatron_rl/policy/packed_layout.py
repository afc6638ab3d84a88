"""Packed tokens <-> padded batches of sequences, and rotary embedding on packed tokens; plain torch, no attention here.

Packed means `thd`: the tokens of all sequences one after the other, `[T, heads, head_dim]`, with `cu_seqlens` telling
where each begins. A loop over sequences costs more than the arithmetic when hundreds of sequences are short. Here
sequences of similar length are padded on the right into one batch by one index, and gathered back by another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

MAX_PADDING = 1.5
"""Sequences stay in one batch while padding makes it at most this many times its tokens; else they are bucketed."""


@dataclass(frozen=True)
class Bucket:
    """Sequences attended together: `count` of them, padded to `length`, from padded row `begin` on."""

    begin: int
    count: int
    length: int

    @property
    def rows(self) -> slice:
        """Its padded rows."""
        return slice(self.begin, self.begin + self.count * self.length)


class PackedLayout:
    """Where each token of a micro-batch stands: its position in its sequence and its row in the padded batches.

    Built once per micro-batch and shared by all layers and by recomputation. Tokens behind the last sequence form one
    more sequence: attended, and of no meaning.

    Attributes:
        positions: int64 [T], 0 at the first token of every sequence.
        slots: int64 [T], padded row of each token.
        sources: int64 [P], token of each padded row; a padding row repeats the last token of its sequence.
        padding: bool [P], True on padding rows.
        buckets: what to attend together; their rows partition the P padded ones.
    """

    def __init__(self, cu_seqlens: Tensor, num_tokens: int) -> None:
        bounds = cu_seqlens.to(device="cpu", dtype=torch.int64)
        bounds = torch.cat([bounds, bounds.new_tensor([num_tokens])])
        lengths = bounds.diff()
        starts, lengths = bounds[:-1][lengths > 0], lengths[lengths > 0]
        self.buckets, sources, padding, slots = [], [], [], torch.empty(num_tokens, dtype=torch.int64)
        begin = 0
        for members in _group_by_length(lengths):
            bucket = Bucket(begin, len(members), int(lengths[members].max()))
            first, longest = starts[members, None], lengths[members, None] - 1
            column = torch.arange(bucket.length)
            tokens, real = first + column.minimum(longest), column <= longest
            slots[tokens[real]] = torch.arange(bucket.rows.start, bucket.rows.stop)[real.flatten()]
            sources.append(tokens.flatten())
            padding.append(~real.flatten())
            self.buckets.append(bucket)
            begin = bucket.rows.stop
        device = cu_seqlens.device
        self.positions = (torch.arange(num_tokens) - starts.repeat_interleave(lengths)).to(device)
        self.slots = slots.to(device)
        self.sources = torch.cat(sources).to(device)
        self.padding = torch.cat(padding).to(device)
        self._rotations: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def is_padded(self) -> bool:
        """False when the padded rows are the packed tokens, in order: nothing needs to be moved."""
        return len(self.sources) != len(self.slots) or len(self.buckets) > 1

    def rotation(self, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, 1, head_dim / 2] of every token's angles, computed in fp32 and rounded to `dtype`.

        Args:
            inv_freq: fp32 [head_dim / 2], the rotary frequencies; results are kept per tensor.
        """
        key = (id(inv_freq), dtype)
        if key not in self._rotations:
            angles = self.positions.to(torch.float32)[:, None, None] * inv_freq
            # inv_freq is kept so that its id stays its own.
            self._rotations[key] = (inv_freq, angles.cos().to(dtype), angles.sin().to(dtype))
        return self._rotations[key][1:]


def _group_by_length(lengths: Tensor) -> list[Tensor]:
    """Indices of the sequences to attend together: all, or by power of two when padding all to the longest wastes."""
    if len(lengths) * int(lengths.max()) <= MAX_PADDING * int(lengths.sum()):
        return [torch.arange(len(lengths))]
    power = (lengths - 0.5).log2().floor()  # 2^n < length <= 2^(n+1) share n
    return [(power == p).nonzero().flatten() for p in power.unique().tolist()]


def packed_layout(packed: PackedSeqParams, num_tokens: int) -> PackedLayout:
    """The layout of a micro-batch, kept on the object that all layers receive."""
    layout: PackedLayout | None = vars(packed).get("layout")
    if layout is None:
        layout = PackedLayout(packed.cu_seqlens_q, num_tokens)
        vars(packed)["layout"] = layout
    return layout


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (2104.09864): turns the pairs (i, i + head_dim / 2) of `[..., head_dim]` by their token's angle.

    Args:
        x: [T, heads, head_dim].
        cos, sin: [T, 1, head_dim / 2], of x's dtype, without gradient.
    """
    return _Rotate.apply(x, cos, sin)


def pad(x: Tensor, layout: PackedLayout) -> Tensor:
    """Packed tokens [T, ...] -> padded rows [P, ...]. Gradients of padding rows must be 0; they are not read."""
    return _Pad.apply(x, layout)


def unpad(x: Tensor, layout: PackedLayout) -> Tensor:
    """Padded rows [P, ...] -> packed tokens [T, ...]; the gradient of padding rows is 0."""
    return _Unpad.apply(x, layout)


class _Rotate(torch.autograd.Function):
    """The gradient is turned back: no intermediate is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = cos.size(-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin, value=sign)
    return out


class _Pad(torch.autograd.Function):
    """Gathers in both directions: torch would scatter-add in the backward one, row by row on CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: PackedLayout) -> Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.sources)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.layout.slots), None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: PackedLayout) -> Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        layout: PackedLayout = ctx.layout
        padded = grad.index_select(0, layout.sources)
        return padded.masked_fill_(layout.padding.view(-1, *[1] * (grad.dim() - 1)), 0), None
