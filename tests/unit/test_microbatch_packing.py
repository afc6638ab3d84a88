"""Packing to the thd form and back, and the batch that is packed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.policy.batch import TOKEN_FIELDS, SequenceBatch
from megatron_rl.policy.microbatch import plan_microbatches
from megatron_rl.policy.packing import RowShare, pack, unpack


def make_batch(lengths, seed=0, **overrides) -> SequenceBatch:
    """Random tokens and arrays; about half of the tokens trainable, never a first one."""
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(1, 100, size=n) for n in lengths]
    masks = [np.r_[False, rng.random(n - 1) < 0.5] for n in lengths]
    total = int(sum(lengths))
    arrays = {name: rng.normal(size=total).astype(np.float32) for name in TOKEN_FIELDS} | overrides
    temperature = rng.uniform(0.5, 1.5, size=len(lengths))
    return SequenceBatch.from_sequences(sequences, masks, [f"s{i}" for i in range(len(lengths))], temperature, **arrays)


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=10)


@given(LENGTHS, st.integers(1, 8), st.integers(0, 99))
def test_rows_read_a_token_and_carry_what_belongs_to_the_next(lengths, multiple, seed):
    batch = make_batch(lengths, seed)
    order = np.random.default_rng(seed).permutation(len(lengths))
    packed = pack(batch, order, RowShare(total_multiple=multiple))
    assert packed.num_rows % multiple == 0
    temperature = torch.as_tensor(packed.temperature).expand(packed.num_rows)
    row = 0
    for i in order:
        start = batch.offsets[i]
        for t in range(start + 1, start + lengths[i]):
            assert packed.tokens[0, row] == batch.tokens[t - 1]
            assert packed.position_ids[0, row] == t - 1 - start
            assert packed.targets[row] == (batch.tokens[t] if batch.mask[t] else -1)
            assert temperature[row] == batch.temperature[i]
            for name in TOKEN_FIELDS:
                assert getattr(packed, name)[row] == (getattr(batch, name)[t] if batch.mask[t] else 0)
            row += 1
    assert (packed.targets[row:] == -1).all()
    assert packed.num_rows - row < multiple + (row == 0)


@given(LENGTHS, st.integers(1, 8), st.integers(0, 99))
def test_every_row_knows_its_sequence_and_every_sequence_its_trainable_tokens(lengths, multiple, seed):
    batch = make_batch(lengths, seed)
    packed = pack(batch, range(len(lengths)), RowShare(total_multiple=multiple))
    starts, sequences = packed.sequence_starts, packed.sequences
    assert [*starts, packed.num_rows] == packed.cu_seqlens.tolist()
    assert torch.equal(
        sequences.index, torch.bucketize(torch.arange(packed.num_rows), torch.tensor(starts[1:]), right=True)
    )
    counts = [count for count, length in zip(batch.trainable_counts, lengths, strict=True) if length > 1]
    assert sequences.lengths.dtype == torch.float64
    assert sequences.lengths.tolist() == counts + [0.0] * (len(starts) - len(counts))
    assert sequences.sum_over_ranks is None


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_temperature_shared_by_all_sequences_is_one_number(temperature):
    batch = dataclasses.replace(make_batch([3, 4]), temperature=np.full(2, temperature, dtype=np.float32))
    assert pack(batch, [0, 1]).temperature == pytest.approx(temperature, abs=1e-7)


@given(LENGTHS, st.integers(1, 8))
def test_sequence_borders_cover_all_rows(lengths, multiple):
    packed = pack(make_batch(lengths), range(len(lengths)), RowShare(total_multiple=multiple))
    segments = packed.cu_seqlens.diff()
    assert packed.cu_seqlens[0] == 0
    assert packed.cu_seqlens[-1] == packed.num_rows
    assert (segments > 0).all()
    assert packed.max_seqlen == segments.max()
    positions = torch.cat([torch.arange(int(n)) for n in segments])
    assert torch.equal(packed.position_ids[0], positions)


@given(LENGTHS, st.integers(1, 3), st.integers(12, 40), st.integers(1, 4))
def test_outputs_return_in_input_order_aligned_with_tokens(lengths, dp_size, cap, multiple):
    batch = make_batch(lengths)
    plan = plan_microbatches(lengths, dp_size, cap)
    for rank in range(dp_size):
        local = batch.select(plan.sequences(rank))
        packed = [pack(local, indices, RowShare(total_multiple=multiple)) for indices in plan.local(rank)]
        outputs = unpack([(m, m.targets.float()) for m in packed], local.num_tokens)
        not_first = np.ones(local.num_tokens, dtype=bool)
        not_first[local.offsets[:-1]] = False
        expected = np.where(not_first, np.where(local.mask, local.tokens, -1), 0)
        assert outputs.tolist() == expected.tolist()


@given(st.lists(st.integers(2, 12), min_size=1, max_size=20), st.integers(1, 4), st.integers(3, 10))
def test_rows_stay_within_a_cap_that_is_a_multiple(lengths, multiple, factor):
    cap = multiple * max(factor, 12)
    batch = make_batch(lengths)
    for indices in plan_microbatches(lengths, 1, cap).local(0):
        assert pack(batch, indices, RowShare(total_multiple=multiple)).num_rows <= cap


@pytest.mark.parametrize("multiple", [1, 4])
def test_an_empty_microbatch_is_one_masked_dummy(multiple):
    packed = pack(make_batch([3]), [], RowShare(total_multiple=multiple))
    assert packed.num_rows == multiple
    assert packed.targets.tolist() == [-1] * multiple
    assert packed.cu_seqlens.tolist() == [0, multiple]
    assert packed.weights.tolist() == [0.0] * multiple
    assert unpack([(packed, torch.ones(multiple))], num_tokens=3).tolist() == [0.0] * 3


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_values_at_masked_positions_never_reach_a_row(garbage):
    clean = make_batch([4, 5, 3])
    dirty = clean.with_arrays(
        **{name: np.where(clean.mask, getattr(clean, name), np.float32(garbage)) for name in TOKEN_FIELDS}
    )
    packed_clean, packed_dirty = (pack(b, [0, 1, 2], RowShare(total_multiple=4)) for b in (clean, dirty))
    for name in TOKEN_FIELDS:
        assert torch.equal(getattr(packed_clean, name), getattr(packed_dirty, name))


@given(LENGTHS, st.data())
def test_sequences_put_in_another_order_and_back_are_the_same(lengths, data):
    batch = make_batch(lengths)
    order = data.draw(st.permutations(range(len(lengths))))
    back = batch.select(order).select(np.argsort(order))
    for field in dataclasses.fields(batch):
        assert np.array_equal(getattr(back, field.name), getattr(batch, field.name)), field.name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros(6, dtype=np.int32)}, r"tokens must be int64 \[6\], got int32 \[6\]"),
        ({"weights": np.zeros(5, dtype=np.float32)}, r"weights must be float32 \[6\], got float32 \[5\]"),
        ({"offsets": np.array([0, 2, 5])}, "offsets must rise from 0"),
        ({"offsets": np.array([0, 0, 6])}, "offsets must rise from 0"),
        ({"sample_ids": ("a", "a")}, "sample_ids must be unique"),
        ({"mask": np.ones(6, dtype=bool)}, "mask is True on the first token of s0"),
        ({"temperature": np.array([1, 0], dtype=np.float32)}, "temperature must be finite and above 0"),
    ],
)
def test_an_inconsistent_batch_is_refused_naming_the_field(change, message):
    batch = make_batch([2, 4])
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(batch, **change)
