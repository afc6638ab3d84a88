"""Matrices in fp8 blocks: how far a number may move, which parts can be read alone, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.weights import WeightsError, fp8
from megatron_rl.weights.fp8 import BLOCK, LARGEST, Dequantised, dequantise, quantise, scale_shape


class InMemory:
    """A tensor as a source."""

    name = "a matrix"

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), tensor.dtype

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return self.tensor[begin:end]

    def columns(self, begin: int, end: int) -> torch.Tensor:
        return self.tensor[:, begin:end]


def matrix(rows: int, columns: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    """Numbers of very different sizes, from block to block and within each."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(rows, columns, generator=generator) * spread
    return torch.randn(rows, columns, generator=generator) * 10**-exponents


SIZES = st.integers(1, 300)
quick = settings(deadline=None, max_examples=25)


@quick
@given(SIZES, SIZES, st.integers(0, 2**31), st.floats(0, 12), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_number_comes_back_within_the_bound_of_its_block(rows, columns, seed, spread, dtype):
    weight = matrix(rows, columns, seed, spread).to(dtype)
    values, scales = quantise(weight)
    assert values.dtype is torch.float8_e4m3fn
    assert scales.shape == scale_shape(rows, columns)
    scale = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    wanted = weight.double()
    bound = torch.maximum(wanted.abs() / 16, scale.double() / 1024)
    rounding = 4 * torch.finfo(torch.float32).eps * wanted.abs() + torch.finfo(torch.float32).tiny
    assert ((dequantise(values, scales).double() - wanted).abs() <= bound + rounding).all()


def test_the_bound_is_reached():
    """Half-way between two neighbours: 17 / 16 of a power of two, and half of the smallest step."""
    weight = torch.tensor([[LARGEST, 17.0, 2.0**-10]])
    values, scales = quantise(weight)
    assert scales.item() == 1
    assert dequantise(values, scales).tolist() == [[LARGEST, 16.0, 0.0]]


@quick
@given(SIZES, SIZES, st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16]))
def test_what_came_out_of_blocks_goes_back_as_the_same_numbers(rows, columns, seed, dtype):
    values, scales = quantise(matrix(rows, columns, seed))
    again, scales_again = quantise(dequantise(values, scales).to(dtype))
    assert torch.equal(again.float(), values.float())
    torch.testing.assert_close(scales_again, scales, rtol=torch.finfo(dtype).eps, atol=0)


def test_zeros_and_very_large_numbers_survive():
    weight = torch.zeros(130, 130)
    weight[129, 129] = torch.finfo(torch.float32).max
    values, scales = quantise(weight)
    assert scales[0, 0] == 1
    assert torch.equal(dequantise(values, scales), weight)


def test_the_smallest_numbers_become_zero_beside_zeros():
    weight = torch.tensor([[0.0, 2.0**-149]])
    assert torch.equal(dequantise(*quantise(weight)), torch.zeros(1, 2))


def test_numbers_that_are_not_finite_are_not_hidden():
    values, scales = quantise(torch.tensor([[float("nan"), 1.0]]))
    assert dequantise(values, scales).isnan().all()


def test_a_large_matrix_is_quantised_piece_by_piece_to_the_same_numbers(monkeypatch):
    weight = matrix(400, 200, seed=1)
    whole = quantise(weight)
    monkeypatch.setattr(fp8, "CHUNK_BYTES", 1)
    for one, other in zip(whole, quantise(weight), strict=True):
        assert torch.equal(one.float(), other.float())


@quick
@given(SIZES, SIZES, st.data())
def test_rows_and_columns_read_alone_are_those_of_the_whole(rows, columns, data):
    values, scales = quantise(matrix(rows, columns, seed=rows))
    source, whole = Dequantised(InMemory(values), InMemory(scales)), dequantise(values, scales)
    assert source.shape == (rows, columns)
    begin, end = sorted(data.draw(st.lists(st.integers(0, rows), min_size=2, max_size=2)))
    assert torch.equal(source.rows(begin, end), whole[begin:end])
    begin, end = sorted(data.draw(st.lists(st.integers(0, columns), min_size=2, max_size=2)))
    assert torch.equal(source.columns(begin, end), whole[:, begin:end])


def test_scales_of_other_blocks_are_refused():
    with pytest.raises(WeightsError, match=r"scales of shape \[4, 4\].*128 x 128"):
        Dequantised(InMemory(torch.zeros(256, 256).to(torch.float8_e4m3fn)), InMemory(torch.ones(4, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_a_matrix_of_other_numbers_beside_scales_is_refused_with_its_dtype(dtype):
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(WeightsError, match=rf"a matrix: has scales \(_scale_inv\) but dtype {name} instead of"):
        Dequantised(InMemory(torch.zeros(256, 256).to(dtype)), InMemory(torch.ones(2, 2)))


@pytest.mark.parametrize("shape", [(256,), (), (2, 128, 128)])
def test_scales_beside_what_is_no_matrix_are_refused_with_its_shape(shape):
    with pytest.raises(WeightsError, match=r"a matrix: has scales .* but the shape \[.*\]; only matrices"):
        Dequantised(InMemory(torch.zeros(shape).to(fp8.FP8)), InMemory(torch.ones(2)))


@pytest.mark.parametrize("scale", [0.0, -0.5, float("-inf")])
def test_a_scale_that_is_not_positive_is_refused_where_it_is_read(scale):
    scales = torch.ones(2, 2)
    scales[1, 0] = scale
    source = Dequantised(InMemory(torch.ones(256, 256).to(fp8.FP8)), InMemory(scales))
    for read in (lambda: source.rows(200, 210), lambda: source.columns(0, 3)):
        with pytest.raises(WeightsError, match=rf"a matrix_scale_inv: holds a scale of {scale:g}, where every"):
            read()
    assert torch.equal(source.rows(0, 128), torch.ones(128, 256))
    assert torch.equal(source.columns(128, 130), torch.ones(256, 2))
