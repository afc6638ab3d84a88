"""Statistics of a slice, kernel against definition. Rows are short and blocks shorter (`conftest`)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.kernels.triton import vocab_statistics
from megatron_rl.kernels.vocab_rows import MOST_NEGATIVE, Rows

from .exact import exact, random_rows
from .memory import rows_before_a_wall, rows_on_pages


def agree(found, rows):
    wanted = exact(rows).statistics
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("masked", "scaled"), [(False, False), (True, True)])
@pytest.mark.usefixtures("order")
def test_statistics_are_what_they_are_defined_to_be(dtype, masked, scaled):
    rows = random_rows(dtype=dtype, masked=masked, scaled=scaled)
    agree(vocab_statistics(rows, with_entropy=True), rows)


def test_a_target_may_be_any_column_or_none():
    rows = random_rows(rows=13, masked=False)
    agree(vocab_statistics(rows, with_entropy=True), rows)


@pytest.mark.parametrize(
    ("width", "valid"), [(16, 1), (16, 16), (64, 64), (64, 63), (128, 128), (144, 129), (256, 191)]
)
def test_any_vocabulary_is_covered_to_its_last_column(width, valid):
    rows = random_rows(3, width=width, valid=valid)
    agree(vocab_statistics(rows, with_entropy=True), rows)


def test_without_entropy_only_the_last_statistic_is_missing():
    rows = random_rows()
    found = vocab_statistics(rows, with_entropy=False)
    assert torch.equal(found[:3], vocab_statistics(rows, with_entropy=True)[:3])
    assert torch.equal(found[3], torch.zeros_like(found[3]))


@given(seed=st.integers(0, 1000), blocks=st.integers(1, 12), rest=st.integers(0, 15), spread=st.floats(0, 50))
@settings(max_examples=8, deadline=None)
def test_any_rows_agree(seed, blocks, rest, spread):
    rows = random_rows(seed, rows=4, width=16 * blocks, valid=16 * blocks - rest, spread=spread)
    agree(vocab_statistics(rows, with_entropy=True), rows)


@pytest.mark.parametrize("spread", [0.0, 60.0])
@pytest.mark.parametrize("rising", [False, True])
def test_flat_and_peaked_rows_keep_their_precision(spread, rising):
    rows = random_rows(spread=spread)
    ordered = rows.logits.sort(1, descending=not rising).values  # the maximum moves in every block, or in none
    rows = Rows(ordered, rows.target, rows.index, rows.inverse_temperature, rows.valid)
    agree(vocab_statistics(rows, with_entropy=True), rows)


@pytest.mark.parametrize("forbidden", [slice(0, 70), slice(60, 187), slice(130, 187), slice(0, 187, 2)])
def test_minus_infinity_is_a_probability_of_zero(forbidden):
    rows = random_rows(5)
    rows.logits[:, forbidden] = -torch.inf
    rows = Rows(rows.logits, torch.full_like(rows.target, -1), rows.index, rows.inverse_temperature, rows.valid)
    agree(vocab_statistics(rows, with_entropy=True), rows)


def test_a_slice_that_is_minus_infinity_everywhere_has_no_weight():
    rows = random_rows()
    rows.logits.fill_(-torch.inf)
    m, s, _, u = vocab_statistics(Rows(rows.logits, torch.full_like(rows.target, -1), None, None, 187), True)
    assert torch.equal(m, torch.full_like(m, MOST_NEGATIVE))
    assert torch.equal(s, torch.zeros_like(s))
    assert torch.equal(u, torch.zeros_like(u))


def test_a_slice_of_nothing_but_padding_has_no_weight():
    rows = random_rows()
    found = vocab_statistics(Rows(rows.logits, torch.full_like(rows.target, -1), rows.index, None, 0), True)
    assert torch.equal(found[0], torch.full_like(found[0], MOST_NEGATIVE))
    assert torch.equal(found[1:], torch.zeros_like(found[1:]))


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_padding_columns_change_nothing(garbage):
    rows = random_rows()
    clean = vocab_statistics(rows, True)
    rows.logits[:, rows.valid :] = garbage
    assert torch.equal(vocab_statistics(rows, True), clean)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 100, 186])
def test_a_number_that_is_not_finite_shows(bad, column):
    rows = random_rows(masked=False)
    rows.logits[4, column] = bad
    m, s, _, _ = vocab_statistics(rows, True)
    finite = torch.isfinite(m) & torch.isfinite(s)
    assert not finite[4]
    assert finite.sum() == len(finite) - 1


def test_masked_rows_are_never_read():
    rows = random_rows()
    masked = [row for row in range(7) if row not in rows.index]
    pages = Rows(rows_on_pages(rows.logits, masked), rows.target, rows.index, rows.inverse_temperature, rows.valid)
    assert torch.equal(vocab_statistics(pages, True), vocab_statistics(rows, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_behind_the_last_row_is_read(dtype):
    rows = random_rows(dtype=dtype, width=176, valid=170)  # the last block would end at 192
    wall = Rows(rows_before_a_wall(rows.logits), rows.target, rows.index, rows.inverse_temperature, rows.valid)
    assert torch.equal(vocab_statistics(wall, True), vocab_statistics(rows, True))


def test_rows_may_lie_more_than_2_to_the_31_elements_away():
    rows = random_rows(rows=3, masked=False, dtype=torch.bfloat16)
    far = torch.empty(2 * (1 << 30) + 16 + 208, dtype=torch.bfloat16)  # memory that is not touched costs nothing
    logits = far.as_strided((3, 208), ((1 << 30) + 8, 1)).copy_(rows.logits)
    far_rows = Rows(logits, rows.target, None, rows.inverse_temperature, rows.valid)
    assert torch.equal(vocab_statistics(far_rows, True), vocab_statistics(rows, True))


def test_no_live_row_is_no_work():
    rows = random_rows()
    none = torch.empty(0, dtype=torch.int64)
    assert vocab_statistics(Rows(rows.logits, none, none, None, rows.valid), True).shape == (4, 0)
