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

from megatron_rl.policy.zigzag import zigzag

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

    def rows(self, share: int = 1) -> slice:
        """Its padded rows, where each sequence has one of `share` equal parts of them."""
        begin, size = self.begin // share, self.count * self.length // share
        return slice(begin, begin + size)


@dataclass(frozen=True)
class Padding:
    """How packed tokens move to padded rows and back.

    Attributes:
        slots: int64 [T], padded row of each token.
        sources: int64 [P], token of each padded row; a padding row repeats the last token of its stretch.
        unused: bool [P], True on padding rows.
    """

    slots: Tensor
    sources: Tensor
    unused: Tensor

    @classmethod
    def of(cls, starts: Tensor, lengths: Tensor, width: Tensor) -> Padding:
        """Stretches of tokens, in the order of their padded rows; the stretches partition the tokens.

        Args:
            starts, lengths: int64 [n], first token and number of tokens, at least 1, of each stretch.
            width: int64 [n], padded rows of each stretch.
        """
        column = torch.arange(int(width.sum())) - (width.cumsum(0) - width).repeat_interleave(width)
        last = (lengths - 1).repeat_interleave(width)
        sources = starts.repeat_interleave(width) + column.minimum(last)
        unused = column > last
        slots = torch.empty(int(lengths.sum()), dtype=torch.int64)
        slots[sources[~unused]] = (~unused).nonzero().flatten()
        return cls(slots, sources, unused)

    def to(self, device: torch.device) -> Padding:
        """The same on another device."""
        return Padding(self.slots.to(device), self.sources.to(device), self.unused.to(device))

    @property
    def moves(self) -> bool:
        """False when the padded rows are the packed tokens, in order."""
        size = len(self.slots)
        return len(self.sources) != size or not torch.equal(self.sources.cpu(), torch.arange(size))


class PackedLayout:
    """Where each token of a micro-batch stands: its position in its sequence and its row in the padded batches.

    Built once per micro-batch and shared by all layers and by recomputation. Tokens behind the last sequence form one
    more sequence: attended, and of no meaning. With context parallelism (`context_size` > 1) this rank has the queries
    of two chunks of every sequence, see `zigzag`; keys and values are those of all ranks, one rank after the other, and
    there are no tokens behind the last sequence.

    Attributes:
        positions: int64 [T], of this rank's tokens, 0 at the first token of every sequence.
        queries: this rank's tokens and their padded rows; with context parallelism each of their two chunks is padded.
        keys: the tokens of all ranks; the same object without context parallelism.
        buckets: what to attend together; their rows partition those of `keys`, and with share `context_size` those of
            `queries`.
        chunks: with context parallelism, int64 [count] for each bucket: tokens in a chunk of each of its sequences.
    """

    def __init__(self, cu_seqlens: Tensor, num_tokens: int, context_size: int = 1, context_rank: int = 0) -> None:
        self.context_size, self.context_rank = context_size, context_rank
        bounds = cu_seqlens.to(device="cpu", dtype=torch.int64)
        bounds = torch.cat([bounds, bounds.new_tensor([num_tokens * context_size])])
        lengths = bounds.diff()
        starts, lengths = bounds[:-1][lengths > 0], lengths[lengths > 0]
        groups = _group_by_length(lengths)
        members = torch.cat(groups)
        widths = torch.cat([lengths[group].max().expand(len(group)) for group in groups])
        ends = widths.cumsum(0)[torch.tensor([len(group) for group in groups]).cumsum(0) - 1].tolist()
        self.buckets = [
            Bucket(begin, len(group), int(lengths[group].max()))
            for begin, group in zip([0, *ends], groups, strict=False)
        ]
        device = cu_seqlens.device
        whole = torch.arange(num_tokens * context_size) - starts.repeat_interleave(lengths)
        if context_size == 1:
            self.positions = whole.to(device)
            self.queries = self.keys = Padding.of(starts[members], lengths[members], widths).to(device)
        else:
            self._share(starts[members], lengths[members], widths, bounds, whole, device)
            self.chunks = [(lengths[group] // (2 * context_size)).to(device) for group in groups]
        self.is_padded = self.queries.moves
        self._rotations: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor, Tensor]] = {}

    def _share(
        self, starts: Tensor, lengths: Tensor, widths: Tensor, bounds: Tensor, whole: Tensor, device: torch.device
    ) -> None:
        """This rank's part of sequences that are dealt over context-parallel ranks."""
        size = self.context_size
        borders = bounds.numpy()
        by_rank = [torch.from_numpy(zigzag(borders, size, rank)) for rank in range(size)]
        self.positions = whole[by_rank[self.context_rank]].to(device)
        chunk, half = lengths // (2 * size), widths // (2 * size)
        first = torch.stack([starts // size, starts // size + chunk], 1).flatten()
        self.queries = Padding.of(first, chunk.repeat_interleave(2), half.repeat_interleave(2)).to(device)
        in_sequence = Padding.of(starts, lengths, widths)
        gathered = torch.cat(by_rank)  # the whole packed row of each gathered one
        place = torch.empty_like(gathered)
        place[gathered] = torch.arange(len(gathered))
        self.keys = Padding(in_sequence.slots[gathered], place[in_sequence.sources], in_sequence.unused).to(device)

    def visible(self, bucket: int, chunk: int) -> Tensor:
        """bool [count or 1, 1, C, (chunk + 1) C], which keys the queries of the chunk of that number may see.

        C is the padded size of a chunk in this bucket; later keys are seen by none of these queries.
        """
        tokens = self.chunks[bucket]
        size = self.buckets[bucket].length // (2 * self.context_size)
        if (tokens == size).all():
            tokens = tokens[:1]
        position = tokens[:, None] * chunk + torch.arange(size, device=tokens.device)
        return position[:, None, :, None] >= torch.arange((chunk + 1) * size, device=tokens.device)

    def rotation(self, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, 1, rotary_dim / 2] of every token's angles, computed in fp32 and rounded to `dtype`.

        Args:
            inv_freq: fp32 [rotary_dim / 2], the rotary frequencies; results are kept per tensor.
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


def packed_layout(
    packed: PackedSeqParams, num_tokens: int, context_size: int = 1, context_rank: int = 0
) -> PackedLayout:
    """The layout of a micro-batch, kept on the object that all layers receive."""
    layout: PackedLayout | None = vars(packed).get("layout")
    if layout is None:
        layout = PackedLayout(packed.cu_seqlens_q, num_tokens, context_size, context_rank)
        vars(packed)["layout"] = layout
    return layout


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (2104.09864): turns the pairs (i, i + rotary_dim / 2) of `[..., head_dim]` by their token's
    angle; features from `rotary_dim` on stay as they are.

    Args:
        x: [T, heads, head_dim].
        cos, sin: [T, 1, rotary_dim / 2], of x's dtype, without gradient.
    """
    return _Rotate.apply(x, cos, sin)


def pad(x: Tensor, padding: Padding) -> Tensor:
    """Packed tokens [T, ...] -> padded rows [P, ...]. Gradients of padding rows must be 0; they are not read."""
    return _Pad.apply(x, padding)


def unpad(x: Tensor, padding: Padding) -> Tensor:
    """Padded rows [P, ...] -> packed tokens [T, ...]; the gradient of padding rows is 0."""
    return _Unpad.apply(x, padding)


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
    half, end = cos.size(-1), 2 * cos.size(-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    first, second = x[..., :half], x[..., half:end]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out[..., half:end]).addcmul_(first, sin, value=sign)
    out[..., end:] = x[..., end:]
    return out


class _Pad(torch.autograd.Function):
    """Gathers in both directions: torch would scatter-add in the backward one, row by row on CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: Padding) -> Tensor:
        ctx.padding = padding
        return x.index_select(0, padding.sources)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.padding.slots), None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: Padding) -> Tensor:
        ctx.padding = padding
        return x.index_select(0, padding.slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        padding: Padding = ctx.padding
        padded = grad.index_select(0, padding.sources)
        return padded.masked_fill_(padding.unused.view(-1, *[1] * (grad.dim() - 1)), 0), None
