"""How one Megatron parameter relates to its Hugging Face tensors under tensor parallelism; names are not known here.

A layout has two directions. `local` cuts this rank's part out of Hugging Face tensors, reading nothing but the needed
rows or columns. `full` puts the parts of all tensor-parallel ranks together again. They invert each other bit for bit.

`pieces` says the same without ranks: which rows of which Hugging Face tensor follow each other in the whole Megatron
parameter. A conversion of files needs nothing else, and copies rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.weights.convert.tensors import Rows

if TYPE_CHECKING:
    from megatron_rl.config import HfConfig


class Source(Rows, Protocol):
    """One Hugging Face tensor on disk; reads only what is asked for."""

    def columns(self, begin: int, end: int) -> Tensor:
        """Columns `begin` to `end` of the second dimension."""


@dataclass(frozen=True)
class Piece:
    """Rows `begin` to `end` of the Hugging Face tensor number `source` of a rule."""

    source: int
    begin: int
    end: int


@dataclass(frozen=True)
class Shard:
    """Which part of a tensor-parallel parameter is meant: part `rank` of `size`; this rank's has `rows` rows."""

    rank: int
    size: int
    rows: int


class Layout(Protocol):
    """The two directions, see the module's docstring."""

    is_split: bool = True
    """Whether tensor-parallel ranks hold different parts; if not, each holds the whole."""
    is_padded: bool = False
    """Whether Megatron adds rows of zeros at the end."""

    def local(self, sources: Sequence[Source], shard: Shard, hf: HfConfig) -> Tensor:
        """This rank's parameter, from the Hugging Face tensors of its rule (in the rule's order)."""

    def full(self, shards: Sequence[Tensor], hf: HfConfig) -> list[Tensor]:
        """The Hugging Face tensors of the rule, from the parameters of all ranks (one element if not `is_split`)."""
        return [_joined(shards)]

    def pieces(self, counts: Sequence[int], hf: HfConfig) -> list[Piece]:
        """What the whole parameter is made of, row by row, without padding; `counts`: rows of the rule's tensors."""
        return [Piece(source, 0, count) for source, count in enumerate(counts)]


def _joined(shards: Sequence[Tensor], dim: int = 0) -> Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim)


def _row_block(source: Source, shard: Shard) -> Tensor:
    size = source.shape[0] // shard.size
    return source.rows(shard.rank * size, (shard.rank + 1) * size)


class Replicated(Layout):
    """The whole tensor on every rank: norms."""

    is_split = False

    def local(self, sources: Sequence[Source], shard: Shard, hf: HfConfig) -> Tensor:
        return sources[0].rows(0, sources[0].shape[0])


class RowParallel(Layout):
    """Split along the input features, the second dimension: attention output and down projections."""

    def local(self, sources: Sequence[Source], shard: Shard, hf: HfConfig) -> Tensor:
        size = sources[0].shape[1] // shard.size
        return sources[0].columns(shard.rank * size, (shard.rank + 1) * size)

    def full(self, shards: Sequence[Tensor], hf: HfConfig) -> list[Tensor]:
        return [_joined(shards, dim=1)]


class ColumnParallel(Layout):
    """Split along the output features, the first dimension: projections to whole heads."""

    def local(self, sources: Sequence[Source], shard: Shard, hf: HfConfig) -> Tensor:
        return _row_block(sources[0], shard)


class Vocabulary(Layout):
    """Split along the vocabulary, which Megatron pads: rows past the true vocabulary are zero, and never leave."""

    is_padded = True

    def local(self, sources: Sequence[Source], shard: Shard, hf: HfConfig) -> Tensor:
        begin, end = (min(rank * shard.rows, hf.vocab_size) for rank in (shard.rank, shard.rank + 1))
        rows, missing = sources[0].rows(begin, end), shard.rows - (end - begin)
        return F.pad(rows, (0, 0, 0, missing)) if missing else rows

    def full(self, shards: Sequence[Tensor], hf: HfConfig) -> list[Tensor]:
        return [_joined(shards)[: hf.vocab_size]]


class GateUp(Layout):
    """Two column-parallel matrices in one: every rank holds [its rows of gate; its rows of up]."""

    def local(self, sources: Sequence[Source], shard: Shard, hf: HfConfig) -> Tensor:
        return torch.cat([_row_block(source, shard) for source in sources])

    def full(self, shards: Sequence[Tensor], hf: HfConfig) -> list[Tensor]:
        halves = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return [_joined(parts) for parts in halves]


class QueryKeyValue(Layout):
    """Weights or biases of q, k, v, interleaved by query group: [queries of group 0, its key, its value, ...].

    Ranks hold equal parts of these rows: whole groups while TP divides the number of groups; with more ranks than
    groups a part of one group, which Megatron gathers again before it attends.
    """

    def local(self, sources: Sequence[Source], shard: Shard, hf: HfConfig) -> Tensor:
        begin, end = shard.rank * shard.rows, (shard.rank + 1) * shard.rows
        parts, position = [], 0
        for piece in self.pieces([source.shape[0] for source in sources], hf):
            first, last = max(begin - position, 0), min(end - position, piece.end - piece.begin)
            if first < last:
                parts.append(sources[piece.source].rows(piece.begin + first, piece.begin + last))
            position += piece.end - piece.begin
        return torch.cat(parts)

    def full(self, shards: Sequence[Tensor], hf: HfConfig) -> list[Tensor]:
        queries = hf.num_attention_heads // hf.num_query_groups * hf.head_dim
        whole = _joined(shards).unflatten(0, (hf.num_query_groups, -1))
        return [part.flatten(0, 1) for part in whole.split([queries, hf.head_dim, hf.head_dim], dim=1)]

    def pieces(self, counts: Sequence[int], hf: HfConfig) -> list[Piece]:
        sizes = [count // hf.num_query_groups for count in counts]
        return [
            Piece(source, group * size, (group + 1) * size)
            for group in range(hf.num_query_groups)
            for source, size in enumerate(sizes)
        ]
