"""The core attention over packed sequences equals attention sequence by sequence, in value and gradient."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl.policy.attention import PackedAttention
from megatron_rl.policy.packed_layout import packed_layout, rotate

HEADS, GROUPS, DIM = 4, 2, 8
INV_FREQ = 1.0 / 100.0 ** (torch.arange(0, DIM, 2) / DIM)


def attention() -> PackedAttention:
    config = SimpleNamespace(kv_channels=DIM)
    return PackedAttention(config, 1, None, "self", inv_freq=INV_FREQ)


def packed_of(lengths: list[int]) -> PackedSeqParams:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)


def one_by_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    layout = packed_layout(packed_of(lengths), sum(lengths))
    rotation = layout.rotation(INV_FREQ, torch.float32)
    query, key = rotate(query, *rotation), rotate(key, *rotation)
    outputs = []
    for parts in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        q, k, v = (part.transpose(0, 1) for part in parts)
        k, v = (x.repeat_interleave(HEADS // GROUPS, dim=0) for x in (k, v))
        outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1))
    return torch.cat(outputs)


@pytest.mark.parametrize(
    "lengths", [[6, 6], [5, 7, 6], [1, 30, 2, 3, 4, 29], [1]], ids=["equal", "similar", "skewed", "single-token"]
)
def test_packed_attention_equals_attention_one_by_one(lengths: list[int]) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(sum(lengths), heads, DIM, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS)]
    # Every token gets gradient, the last of each sequence too, which padding repeats.
    upstream = torch.randn(sum(lengths), HEADS * DIM)
    results = []
    for compute in (
        lambda *qkv: attention()(*qkv, None, packed_seq_params=packed_of(lengths)),
        lambda *qkv: one_by_one(*qkv, lengths),
    ):
        output = compute(*inputs)
        results.append((output, *torch.autograd.grad(output, inputs, upstream)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


def test_layout_is_built_once_for_all_layers() -> None:
    packed = packed_of([2, 3])
    query, key = torch.randn(5, HEADS, DIM), torch.randn(5, GROUPS, DIM)
    attention()(query, key, key, None, packed_seq_params=packed)
    layout = packed_layout(packed, 5)
    attention()(query, key, key, None, packed_seq_params=packed)
    assert packed_layout(packed, 5) is layout
