"""Gradient of a slice's logits, kernel against float64, wherever it is written."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.kernels.triton import combine, logits_gradient, vocab_statistics
from megatron_rl.kernels.vocab_rows import Rows

from .exact import exact_gradient, random_rows
from .memory import rows_before_a_wall, rows_on_pages


class Case:
    """Rows with statistics and random gradients; `run` computes, `wanted` is float64."""

    def __init__(self, seed=0, with_grad=True, with_entropy=True, zeros=(), **options):
        self.rows = random_rows(seed, **options)
        stats = vocab_statistics(self.rows, True)
        other = torch.stack([stats[0] + 0.3, stats[1] * 0.7, 0 * stats[2], stats[3] * 0.6])  # another rank's slice
        self.maximum, self.merged = stats[0], combine(torch.stack([other, stats]), 1)
        n = len(self.rows.target)
        # What stands before the first is not 0 either, so that taking it for a masked row's would show.
        self.grad, self.entropy_grad = torch.randn(2, n + 1, generator=torch.Generator().manual_seed(seed + 1))[:, 1:]
        for row in zeros:
            self.grad[row] = self.entropy_grad[row] = 0.0
        self.grad = self.grad if with_grad else None
        self.entropy_grad = self.entropy_grad if with_entropy else None

    def run(self, rows=None, out=None):
        return logits_gradient(
            self.rows if rows is None else rows,
            maximum=self.maximum,
            log_norm=self.merged.log_norm,
            grad=self.grad,
            entropy=self.merged.entropy,
            entropy_grad=self.entropy_grad,
            out=out,
        )

    def wanted(self):
        return exact_gradient(self.rows, self.merged.log_norm, self.merged.entropy, self.grad, self.entropy_grad)

    def with_logits(self, logits):
        r = self.rows
        return Rows(logits, r.target, r.index, r.inverse_temperature, r.valid)


def agree(found, wanted):
    """To float32's precision, and after rounding to nearest even: at most a rare neighbour, never half of them off."""
    if found.dtype == torch.float32:
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-6)
        return
    nearest = wanted.float().to(found.dtype)
    assert (found == nearest).double().mean() > 0.98
    torch.testing.assert_close(found, nearest, rtol=0.01, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("masked", "scaled", "with_entropy"), [(False, False, False), (True, True, True), (True, False, True)]
)
def test_the_gradient_is_the_derivative(dtype, masked, scaled, with_entropy):
    case = Case(dtype=dtype, masked=masked, scaled=scaled, with_entropy=with_entropy)
    agree(case.run(), case.wanted())


@given(seed=st.integers(0, 1000), blocks=st.integers(1, 12), rest=st.integers(0, 15), with_grad=st.booleans())
@settings(max_examples=8, deadline=None)
def test_any_rows_agree(seed, blocks, rest, with_grad):
    case = Case(seed, rows=4, width=16 * blocks, valid=16 * blocks - rest, with_grad=with_grad)
    agree(case.run(), case.wanted())


def test_a_target_may_be_any_column_or_none():
    case = Case(rows=13, masked=False)
    agree(case.run(), case.wanted())


def test_the_entropy_alone_may_be_in_the_loss():
    case = Case(with_grad=False)
    agree(case.run(), case.wanted())


@pytest.mark.parametrize(("width", "valid"), [(16, 1), (16, 16), (64, 64), (64, 63), (128, 128), (144, 129), (256, 64)])
def test_any_vocabulary_is_covered_and_its_padding_gets_zero(width, valid):
    case = Case(3, width=width, valid=valid)
    out = torch.full((7, width), torch.nan)
    assert case.run(out=out) is out
    agree(out, case.wanted())
    assert torch.all(out[:, valid:] == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_may_take_the_place_of_the_logits(dtype):
    case = Case(dtype=dtype)
    apart = case.run()
    assert torch.equal(case.run(out=case.rows.logits), apart)
    assert torch.equal(case.rows.logits, apart)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("order")
def test_a_narrow_gradient_may_lie_over_the_front_of_wide_rows(narrow):
    case = Case()
    wanted = case.wanted()
    rest = case.rows.logits[:, 104:].clone()
    out = case.rows.logits.view(narrow)[:, :208]
    agree(case.run(out=out), wanted)
    assert torch.equal(case.rows.logits[:, 104:], rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_a_number_shows_in_its_row_alone(dtype):
    case = Case(dtype=dtype, masked=False)
    case.grad[3] = torch.nan
    found = case.run(out=torch.empty(7, 208, dtype=torch.bfloat16))
    assert torch.equal(torch.isnan(found).any(1), torch.arange(7) == 3)
    assert torch.isnan(found[3, : case.rows.valid]).all()


@pytest.mark.parametrize("forbidden", [slice(0, 70), slice(60, 187), slice(0, 187, 2), slice(0, 187)])
def test_minus_infinity_gets_no_gradient(forbidden):
    rows = random_rows(5)
    rows.logits[:, forbidden] = -torch.inf
    case = Case(5)
    case.rows = Rows(rows.logits, torch.full_like(rows.target, -1), rows.index, rows.inverse_temperature, rows.valid)
    stats = vocab_statistics(case.rows, True)
    other = torch.stack([torch.ones(5), torch.ones(5) + 1, torch.zeros(5), torch.zeros(5) - 0.1])
    case.maximum, case.merged = stats[0], combine(torch.stack([stats, other]), 0)
    found = case.run()
    agree(found, case.wanted())
    assert torch.all(found[:, forbidden] == 0)


def test_masked_rows_and_rows_without_gradient_are_zeroed_and_never_read():
    case = Case(zeros=(1, 3))
    masked = [row for row in range(7) if row not in case.rows.index]
    still = [*masked, *case.rows.index[[1, 3]].tolist()]
    pages = case.with_logits(rows_on_pages(case.rows.logits, still))
    out = torch.full((7, 208), torch.nan)
    found = case.run(pages, out)
    assert torch.equal(found, case.run())
    assert torch.all(found[still] == 0)


def test_one_gradient_of_two_is_enough_to_act():
    case = Case()
    case.grad[0] = case.entropy_grad[1] = 0.0
    agree(case.run(), case.wanted())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_beside_the_rows_is_read_or_written(dtype):
    case = Case(dtype=dtype)
    room = torch.full((7, 256), 7.0, dtype=dtype)
    found = case.run(case.with_logits(rows_before_a_wall(case.rows.logits)), room[:, :208])
    assert torch.equal(found, case.run())
    assert torch.all(room[:, 208:] == 7.0)


def test_rows_may_lie_more_than_2_to_the_31_elements_away():
    case = Case(rows=3, masked=False, dtype=torch.bfloat16)
    far = torch.empty(2 * (1 << 30) + 16 + 208, dtype=torch.bfloat16)  # memory that is not touched costs nothing
    logits = far.as_strided((3, 208), ((1 << 30) + 8, 1)).copy_(case.rows.logits)
    wanted = case.run()
    assert torch.equal(case.run(case.with_logits(logits)), wanted)
    assert torch.equal(case.run(out=logits), wanted)


def test_no_rows_are_no_work():
    empty = torch.empty(0)
    rows = Rows(torch.empty(0, 64), empty.long(), None, None, 64)
    options = {"maximum": empty, "log_norm": empty, "grad": empty, "entropy": empty, "entropy_grad": None, "out": None}
    assert logits_gradient(rows, **options).shape == (0, 64)
