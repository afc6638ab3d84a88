"""How one Megatron parameter relates to its Hugging Face tensors under tensor parallelism; names are not known here.

A layout has two directions. `local` cuts this rank's part out of Hugging Face tensors, reading nothing but the needed
rows or columns. `full` puts the parts of all tensor-parallel ranks together again. They invert each other bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from megatron_rl.config import HfConfig


class Source(Protocol):
    """One Hugging Face tensor on disk; indexing reads only what is asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows `begin` to `end` of the first dimension."""

    def columns(self, begin: int, end: int) -> Tensor:
        """Columns `begin` to `end` of the second dimension."""


@dataclass(frozen=True)
class Shard:
    """Which part of a tensor-parallel parameter is meant: part `rank` of `size`; this rank's has `rows` rows."""

    rank: int
    size: int
    rows: int


class Layout(Protocol):
    """The two directions, see the module's docstring."""

    is_split: bool
    """Whether tensor-parallel ranks hold different parts; if not, each holds the whole."""

    def local(self, sources: Sequence[Source], shard: Shard, hf: HfConfig) -> Tensor:
        """This rank's parameter, from the Hugging Face tensors of its rule (in the rule's order)."""

    def full(self, shards: Sequence[Tensor], hf: HfConfig) -> list[Tensor]:
        """The Hugging Face tensors of the rule, from the parameters of all ranks (one element if not `is_split`)."""


def _row_block(source: Source, shard: Shard) -> Tensor:
    size = source.shape[0] // shard.size
    return source.rows(shard.rank * size, (shard.rank + 1) * size)


class Replicated:
    """The whole tensor on every rank: norms."""

    is_split = False

    def local(self, sources: Sequence[Source], shard: Shard, hf: HfConfig) -> Tensor:
        return sources[0].rows(0, sources[0].shape[0])

    def full(self, shards: Sequence[Tensor], hf: HfConfig) -> list[Tensor]:
        return [shards[0]]


class RowParallel:
    """Split along the input features, the second dimension: attention output and down projections."""

    is_split = True

    def local(self, sources: Sequence[Source], shard: Shard, hf: HfConfig) -> Tensor:
        size = sources[0].shape[1] // shard.size
        return sources[0].columns(shard.rank * size, (shard.rank + 1) * size)

    def full(self, shards: Sequence[Tensor], hf: HfConfig) -> list[Tensor]:
        return [shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=1)]


class Vocabulary:
    """Split along the vocabulary, which Megatron pads: rows past the true vocabulary are zero, and never leave."""

    is_split = True

    def local(self, sources: Sequence[Source], shard: Shard, hf: HfConfig) -> Tensor:
        vocab_size = sources[0].shape[0]
        if vocab_size != hf.vocab_size:
            raise ValueError(f"config.json says vocab_size={hf.vocab_size}")
        begin, end = (min(rank * shard.rows, vocab_size) for rank in (shard.rank, shard.rank + 1))
        rows = sources[0].rows(begin, end)
        return rows if end - begin == shard.rows else F.pad(rows, (0, 0, 0, shard.rows - (end - begin)))

    def full(self, shards: Sequence[Tensor], hf: HfConfig) -> list[Tensor]:
        whole = shards[0] if len(shards) == 1 else torch.cat(list(shards))
        return [whole[: hf.vocab_size]]


class GateUp:
    """Two column-parallel matrices in one: every rank holds [its rows of gate; its rows of up]."""

    is_split = True

    def local(self, sources: Sequence[Source], shard: Shard, hf: HfConfig) -> Tensor:
        return torch.cat([_row_block(source, shard) for source in sources])

    def full(self, shards: Sequence[Tensor], hf: HfConfig) -> list[Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[part] for half in halves]) for part in (0, 1)]


class QueryKeyValue:
    """Weights or biases of q, k, v, interleaved by query group: [queries of group 0, its key, its value, ...].

    Ranks hold whole groups, so that TP must divide the number of groups.
    """

    is_split = True

    def local(self, sources: Sequence[Source], shard: Shard, hf: HfConfig) -> Tensor:
        groups = hf.num_query_groups // shard.size
        parts = [_row_block(source, shard).unflatten(0, (groups, -1)) for source in sources]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def full(self, shards: Sequence[Tensor], hf: HfConfig) -> list[Tensor]:
        queries = hf.num_attention_heads // hf.num_query_groups * hf.head_dim
        whole = torch.cat(list(shards)).unflatten(0, (hf.num_query_groups, -1))
        return [part.flatten(0, 1) for part in whole.split([queries, hf.head_dim, hf.head_dim], dim=1)]
