"""Padding and unpadding of packed sequences: nothing is lost, gradients are exact, padding stays bounded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.policy.packed_layout import PackedLayout, pad, rotate, unpad

lengths_of = st.lists(st.integers(1, 70), min_size=1, max_size=20)


def layout_of(lengths: list[int], behind: int = 0) -> PackedLayout:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedLayout(cu_seqlens, sum(lengths) + behind)


@given(lengths_of, st.integers(0, 5))
def test_positions_count_from_the_start_of_every_sequence(lengths: list[int], behind: int) -> None:
    expected = torch.cat([torch.arange(n) for n in [*lengths, behind]])
    assert torch.equal(layout_of(lengths, behind).positions, expected)


@given(lengths_of, st.integers(0, 5))
def test_unpad_inverts_pad_and_rows_keep_their_sequence(lengths: list[int], behind: int) -> None:
    layout = layout_of(lengths, behind)
    tokens = torch.arange(sum(lengths) + behind)
    padded = pad(tokens, layout.keys)
    assert torch.equal(unpad(padded, layout.keys), tokens)
    sequence = torch.arange(len(lengths) + 1).repeat_interleave(torch.tensor([*lengths, behind]))
    for bucket in layout.buckets:
        rows = sequence[padded[bucket.rows()]].view(bucket.count, bucket.length)
        assert (rows == rows[:, :1]).all()
        real = ~layout.keys.unused[bucket.rows()].view(bucket.count, bucket.length)
        assert (real.int().diff(dim=1) <= 0).all()  # real tokens first, in order
        assert (padded[bucket.rows()].view(bucket.count, -1).diff(dim=1)[real[:, 1:]] == 1).all()


@given(lengths_of)
def test_padding_at_most_doubles_the_tokens(lengths: list[int]) -> None:
    assert len(layout_of(lengths).keys.sources) <= 2 * sum(lengths)


def test_skewed_lengths_are_attended_in_buckets_and_similar_ones_together() -> None:
    assert [(b.count, b.length) for b in layout_of([60, 2, 3, 4, 33]).buckets] == [(1, 2), (2, 4), (2, 60)]
    assert [(b.count, b.length) for b in layout_of([16, 21, 18, 17]).buckets] == [(4, 21)]


def test_equal_lengths_need_no_moving() -> None:
    assert not layout_of([7, 7, 7]).is_padded
    assert layout_of([7, 7, 6]).is_padded
    assert layout_of([64, 1, 1, 1]).is_padded


def test_gradients_pass_through_padding_exactly() -> None:
    layout = layout_of([3, 50, 1, 2], behind=2)
    x = torch.randn(58, 2, 4, dtype=torch.float64, requires_grad=True)
    # A padding row must not send gradient to the token it repeats: rows are weighted before they are dropped.
    weight = torch.randn(len(layout.keys.sources), 1, 1, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: unpad(pad(x, layout.keys) * weight, layout.keys), (x,), fast_mode=True)


def test_rotation_is_transformers_rotation_and_its_gradient_turns_back() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    layout = layout_of([5, 3])
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    x = torch.randn(8, 2, 8, requires_grad=True)
    cos, sin = layout.rotation(inv_freq, torch.float32)
    full = [torch.cat([part, part], -1).transpose(0, 1) for part in (cos, sin)]
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *full)
    torch.testing.assert_close(rotate(x, cos, sin), expected[0].transpose(0, 1), rtol=0, atol=1e-6)
    y = torch.randn(8, 2, 8, dtype=torch.float64, requires_grad=True)
    double = [part.double() for part in (cos, sin)]
    assert torch.autograd.gradcheck(lambda y: rotate(y, *double), (y,), fast_mode=True)


def test_with_fewer_angles_the_first_features_are_rotated_and_the_others_stay() -> None:
    from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb

    cos, sin = layout_of([5, 3]).rotation(1.0 / 10000.0 ** (torch.arange(0, 4, 2) / 4), torch.float32)
    full = [torch.cat([part, part], -1).transpose(0, 1) for part in (cos, sin)]
    x = torch.randn(8, 2, 10)
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *full)
    torch.testing.assert_close(rotate(x, cos, sin), expected[0].transpose(0, 1), rtol=0, atol=1e-6)
    assert torch.equal(rotate(x, cos, sin)[..., 4:], x[..., 4:])
    y = torch.randn(8, 2, 10, dtype=torch.float64, requires_grad=True)
    double = [part.double() for part in (cos, sin)]
    assert torch.autograd.gradcheck(lambda y: rotate(y, *double), (y,), fast_mode=True)


def test_rotation_is_computed_once_per_frequencies_and_dtype() -> None:
    layout = layout_of([5, 3])
    first, second = torch.ones(4), torch.ones(4) / 2
    assert layout.rotation(first, torch.float32)[0] is layout.rotation(first, torch.float32)[0]
    assert not torch.equal(layout.rotation(first, torch.float32)[0], layout.rotation(second, torch.float32)[0])
    assert layout.rotation(first, torch.bfloat16)[0].dtype is torch.bfloat16


@pytest.mark.parametrize("empty_at", [0, 1, 3])
def test_sequences_without_tokens_are_skipped(empty_at: int) -> None:
    lengths = [4, 6, 5]
    lengths.insert(empty_at, 0)
    assert torch.equal(layout_of(lengths).positions, layout_of([4, 6, 5]).positions)
