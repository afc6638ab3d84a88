"""Statistics of slices merge into what the whole row has, in whatever way it was cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.kernels.triton import combine, merge, vocab_statistics
from megatron_rl.kernels.triton.statistics import combine_kernel
from megatron_rl.kernels.vocab_rows import MOST_NEGATIVE, Rows

from .exact import random_rows


def slices(rows, cuts):
    """Statistics [parts, 4, n] of the row cut at `cuts`, in steps of 16 columns as Megatron cuts it."""
    found = []
    for first, last in zip([0, *cuts], [*cuts, rows.logits.shape[1]], strict=True):
        part = Rows(
            rows.logits[:, first:last].contiguous(),
            rows.target - first,
            rows.index,
            rows.inverse_temperature,
            max(0, min(last, rows.valid) - first),
        )
        found.append(vocab_statistics(part, True))
    return torch.stack(found)


def plain_rows(seed=0, rows=7):
    found = random_rows(seed, rows=rows)
    return Rows(
        found.logits, found.target.clamp(0, found.valid - 1), found.index, found.inverse_temperature, found.valid
    )


def wanted(rows):
    x = rows.logits[rows.index].double()[:, : rows.valid] * rows.inverse_temperature.double()
    log_p = x.log_softmax(1)
    log_probs = log_p.gather(1, rows.target[:, None]).squeeze(1)
    return log_probs, -(log_p.exp() * log_p).sum(1), x.logsumexp(1)


@pytest.mark.parametrize("cuts", [[], [64], [16, 32, 160], [192], [48, 192]])
@pytest.mark.usefixtures("order")
def test_any_cut_gives_log_probs_and_entropy_of_the_whole_row(cuts):
    rows = plain_rows(rows=28)  # more live rows than one program takes
    log_probs, entropy, log_sum = wanted(rows)
    stats = slices(rows, cuts)
    for rank in range(len(stats)):
        found = combine(stats, rank)
        torch.testing.assert_close(found.log_prob.double(), log_probs, rtol=2e-6, atol=4e-6)
        torch.testing.assert_close(found.entropy.double(), entropy, rtol=2e-6, atol=4e-6)
        if stats[rank, 1].min() > 0:  # of a slice of nothing but padding it has no meaning
            torch.testing.assert_close((stats[rank, 0] + found.log_norm).double(), log_sum, rtol=2e-6, atol=4e-6)


@given(seed=st.integers(0, 1000), cuts=st.sets(st.integers(1, 12), max_size=5))
@settings(max_examples=8, deadline=None)
def test_a_random_cut_gives_what_the_whole_row_gives(seed, cuts):
    rows = plain_rows(seed)
    whole, cut = combine(slices(rows, []), 0), combine(slices(rows, [16 * c for c in sorted(cuts)]), 0)
    torch.testing.assert_close(cut.log_prob, whole.log_prob, rtol=2e-6, atol=4e-6)
    torch.testing.assert_close(cut.entropy, whole.entropy, rtol=2e-6, atol=4e-6)


def test_log_probs_and_entropy_are_equal_to_the_last_bit_on_every_rank():
    stats = slices(plain_rows(), [32, 80, 144])
    found = [combine(stats, rank) for rank in range(4)]
    for other in found[1:]:
        assert torch.equal(found[0].log_prob, other.log_prob)
        assert torch.equal(found[0].entropy, other.entropy)


@pytest.mark.usefixtures("order")
def test_parts_of_a_slice_merge_into_the_slice():
    rows = plain_rows(rows=28)
    torch.testing.assert_close(merge(slices(rows, [16, 96]), True), slices(rows, [])[0], rtol=2e-6, atol=4e-6)
    (only,) = slices(rows, [])
    assert torch.equal(merge(only[None], True), only)


def test_statistics_of_wide_apart_parts_do_not_overflow():
    parts = torch.tensor(
        [[[3e4], [1.0], [0.0], [0.0]], [[-3e4], [5.0], [-3e4], [0.0]], [[MOST_NEGATIVE], [0], [0], [0]]]
    )
    found = combine(parts, 1)
    assert found.log_prob.item() == -6e4
    assert found.log_norm.item() == 6e4
    assert found.entropy.item() == 0.0


def test_parts_without_entropy_merge_into_a_slice_without():
    stats = slices(plain_rows(), [96])
    found = merge(stats, False)
    assert torch.equal(found[:3], merge(stats, True)[:3])
    assert torch.equal(found[3], torch.zeros_like(found[3]))


def test_no_rows_are_no_work():
    assert combine(torch.empty(3, 4, 0), 1).log_prob.shape == (0,)
    assert merge(torch.empty(3, 4, 0), True).shape == (4, 0)


def test_nothing_beside_the_rows_is_written():
    parts = torch.rand(2, 4, 5) + 0.5
    stats = combine(parts, 0)
    room = torch.full((3, 16), 7.0)
    combine_kernel[(1,)](parts, room[0], room[1], room[2], 5, 2, 0, ROWS=16)
    assert torch.equal(room[:, :5], torch.stack([stats.log_prob, stats.log_norm, stats.entropy]))
    assert torch.equal(room[:, 5:], torch.full((3, 11), 7.0))
