"""Rows of context-parallel ranks: in Megatron's order, each once, and attention over them is attention over the whole.

All ranks of a group live in this process here; as real ones they are in tests/parallel/test_policy_parity.py.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.policy.attention import PackedAttention
from megatron_rl.policy.batch import TOKEN_FIELDS, SequenceBatch
from megatron_rl.policy.microbatch import plan_microbatches
from megatron_rl.policy.packed_layout import PackedLayout
from megatron_rl.policy.packing import MicroBatch, RowShare, pack, unpack
from megatron_rl.policy.zigzag import zigzag
from tests.unit.test_microbatch_packing import make_batch

HEADS, GROUPS, DIM, VALUE_DIM = 4, 2, 8, 6
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
SIZES = st.integers(2, 4)


def layout_of(size: int, shares: int = 1) -> ParallelConfig:
    return ParallelConfig(context_parallel_size=size, tensor_model_parallel_size=shares, sequence_parallel=shares > 1)


def packed_by(batch: SequenceBatch, indices: Any, parallel: ParallelConfig) -> list[MicroBatch]:
    """What each context-parallel rank packs."""
    size = parallel.context_parallel_size
    multiples = parallel.sequence_multiple, parallel.row_multiple
    return [pack(batch, indices, RowShare(*multiples, size, rank)) for rank in range(size)]


def partitioned(borders: list[int], size: int, rank: int) -> list[int]:
    """The rule of Transformer Engine's `thd_get_partitioned_indices`, row by row: a rank's first half of a sequence
    is chunk `rank`, its second half mirrors it from the end."""
    mine = [border // size for border in borders]
    found = []
    for row in range(mine[-1]):
        sequence = max(i for i, first in enumerate(mine[:-1]) if first <= row)
        length = mine[sequence + 1] - mine[sequence]
        place = row - mine[sequence]
        chunks_before = rank if place < length // 2 else 2 * (size - 1) - rank
        found.append(borders[sequence] + place + length // 2 * chunks_before)
    return found


@given(LENGTHS, SIZES)
def test_rows_are_those_of_megatron_and_transformer_engine(lengths: list[int], size: int) -> None:
    borders = [0, *itertools.accumulate(2 * size * length for length in lengths)]
    places = torch.cat([torch.arange(2 * size * length) for length in lengths])
    seen = []
    for rank in range(size):
        rows = zigzag(np.array(borders), size, rank)
        assert rows.tolist() == partitioned(borders, size, rank)
        of_rotation = [
            _get_thd_freqs_on_this_cp_rank(rank, size, torch.empty(2 * length), torch.arange(2 * size * length))
            for length in lengths
        ]
        assert torch.equal(places[rows], torch.cat(of_rotation))
        seen += rows.tolist()
    assert sorted(seen) == list(range(borders[-1]))


@given(LENGTHS, SIZES, st.integers(1, 4), st.integers(0, 99))
def test_each_row_is_one_ranks_and_carries_the_same_as_unshared(
    lengths: list[int], size: int, shares: int, seed: int
) -> None:
    batch = make_batch(lengths, seed)
    order = np.random.default_rng(seed).permutation(len(lengths))
    whole, ranks = pack(batch, order), packed_by(batch, order, layout_of(size, shares))
    rows = {int(place): row for row, place in enumerate(whole.destination) if place >= 0}
    seen = []
    for mine in ranks:
        assert mine.num_rows == ranks[0].num_rows
        assert mine.num_rows % shares == 0
        assert mine.cu_seqlens[-1] == size * mine.num_rows
        assert [*mine.sequence_starts, mine.num_rows] == (mine.cu_seqlens // size).tolist()
        temperature = torch.as_tensor(mine.temperature).expand(mine.num_rows)
        for row, place in enumerate(mine.destination):
            if place < 0:
                assert mine.targets[row] == -1
                assert mine.tokens[0, row] == 0
                continue
            seen.append(int(place))
            same = rows[int(place)]
            for name in ("tokens", "position_ids"):
                assert getattr(mine, name)[0, row] == getattr(whole, name)[0, same]
            for name in ("targets", *TOKEN_FIELDS):
                assert getattr(mine, name)[row] == getattr(whole, name)[same]
            assert temperature[row] == torch.as_tensor(whole.temperature).expand(whole.num_rows)[same]
            assert mine.sequences.index[row] == whole.sequences.index[same]
    assert sorted(seen) == sorted(rows)
    counts = whole.sequences.lengths[: len(whole.sample_ids)]
    assert all(torch.equal(mine.sequences.lengths[: len(counts)], counts) for mine in ranks)


@given(LENGTHS, SIZES, st.integers(1, 3), st.integers(1, 4))
def test_outputs_of_all_ranks_add_up_to_those_of_the_whole(
    lengths: list[int], size: int, dp_size: int, shares: int
) -> None:
    parallel = layout_of(size, shares)
    multiple = parallel.row_multiple
    cap = -(-max(50, *lengths) // multiple) * multiple
    batch = make_batch(lengths)
    plan = plan_microbatches(lengths, dp_size, cap, sequence_multiple=parallel.sequence_multiple)
    for dp_rank in range(dp_size):
        local = batch.select(plan.sequences(dp_rank))
        total = np.zeros(local.num_tokens, dtype=np.float32)
        by_microbatch = [packed_by(local, indices, parallel) for indices in plan.local(dp_rank)]
        assert all(size * mine.num_rows <= cap for ranks in by_microbatch for mine in ranks)
        for ranks in zip(*by_microbatch, strict=True):
            total += unpack([(m, torch.where(m.trainable, m.targets, 0).float()) for m in ranks], local.num_tokens)
        assert total.tolist() == np.where(local.mask, local.tokens, 0).tolist()


def test_short_sequences_are_planned_with_their_padding() -> None:
    """Thirty sequences of 2 tokens make 120 rows at CP 2: a cap of 64 holds 16 of them."""
    plan = plan_microbatches([2] * 30, 1, 64, sequence_multiple=4)
    assert [len(indices) for indices in plan.local(0)] == [15, 15]


def test_a_sequence_whose_padding_does_not_fit_is_refused_with_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"has 9 tokens \(padded to 12\), more than .*=10: raise .* to at least 12"):
        plan_microbatches([9], 1, 10, sequence_multiple=4)


def test_transformer_engine_is_given_the_padded_borders() -> None:
    batch = make_batch([6, 9])
    mine = packed_by(batch, [0, 1], layout_of(2))[0].packed_seq_params
    assert mine.cu_seqlens_q.tolist() == [0, 8, 16]
    assert mine.cu_seqlens_q_padded is mine.cu_seqlens_kv_padded is mine.cu_seqlens_q  # nothing lies between sequences
    assert mine.max_seqlen_q == 8
    assert pack(batch, [0, 1]).packed_seq_params.cu_seqlens_q_padded is None


class AllRanks(PackedAttention):
    """One rank's attention, with keys and values of the others at hand instead of a process group."""

    def __init__(self, size: int, rank: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        config = SimpleNamespace(kv_channels=DIM)
        group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
        super().__init__(config, 1, None, "self", inv_freq=None, pg_collection=SimpleNamespace(cp=group))
        self._all = keys, values

    def _of_all_ranks(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._all


def whole_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    outputs = []
    for parts in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        q, k, v = (part.transpose(0, 1) for part in parts)
        k, v = (x.repeat_interleave(HEADS // GROUPS, dim=0) for x in (k, v))
        outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1))
    return torch.cat(outputs)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), SIZES, st.sampled_from([torch.float64, torch.float32]))
def test_attention_from_chunks_is_that_of_the_whole_sequence(chunks: list[int], size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lengths = [2 * size * chunk for chunk in chunks]
    borders = torch.tensor([0, *lengths]).cumsum(0)
    shapes = (HEADS, DIM), (GROUPS, DIM), (GROUPS, VALUE_DIM)
    inputs = [torch.randn(sum(lengths), *shape, dtype=dtype, requires_grad=True) for shape in shapes]
    upstream = torch.randn(sum(lengths), HEADS * VALUE_DIM, dtype=dtype)
    rows = [torch.from_numpy(zigzag(borders.numpy(), size, rank)) for rank in range(size)]
    gathered = [x[torch.cat(rows)] for x in inputs[1:]]
    output = torch.zeros_like(upstream)
    for rank in range(size):
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=borders.int())
        mine = [x[rows[rank]] for x in inputs]
        output = output.index_add(0, rows[rank], AllRanks(size, rank, *gathered)(*mine, None, packed_seq_params=packed))
    expected = whole_attention(*inputs, lengths)
    tolerance = 1e-12 if dtype is torch.float64 else 5e-6
    for got, wanted in zip(
        (output, *torch.autograd.grad(output, inputs, upstream)),
        (expected, *torch.autograd.grad(expected, inputs, upstream)),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), SIZES)
def test_tokens_are_rotated_by_their_place_in_the_whole_sequence(chunks: list[int], size: int) -> None:
    lengths = [2 * size * chunk for chunk in chunks]
    borders = torch.tensor([0, *lengths]).cumsum(0)
    whole = PackedLayout(borders, sum(lengths)).positions
    for rank in range(size):
        mine = PackedLayout(borders, sum(lengths) // size, size, rank)
        assert torch.equal(mine.positions, whole[zigzag(borders.numpy(), size, rank)])


def test_every_rank_attends_to_equally_many_keys() -> None:
    borders = torch.tensor([0, 64, 96])
    seen = []
    for rank in range(4):
        layout = PackedLayout(borders, 24, 4, rank)
        masks = [layout.visible(0, chunk) for chunk in (rank, 7 - rank)]
        seen.append(sum(mask.numel() for mask in masks))
    assert len(set(seen)) == 1
