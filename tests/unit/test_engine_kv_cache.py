"""The cache grows with what is asked of it, and does not outgrow its budget while it can help it."""

from __future__ import annotations

import torch

from megatron_rl.engines.embedded.kv_cache import KVCache, KVShape


def shape(max_slots: int = 64, max_length: int = 1000) -> KVShape:
    return KVShape(
        num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.float32, max_slots=max_slots, max_length=max_length
    )


def test_growth_is_geometric_keeps_live_slots_and_stays_within_the_limits() -> None:
    cache = KVCache(shape(), budget=2**30)
    cache.reserve(2, 10, 0)
    assert (cache.slots, cache.length) == (2, 64)
    for layer in range(2):
        cache.keys[layer].fill_(layer + 1.0)
    sizes = set()
    for length in range(11, 1001):
        cache.reserve(2, length, 2)
        sizes.add(cache.length)
    assert max(sizes) == 1000
    assert len(sizes) < 12
    assert [float(k[1, 0, 63, 0]) for k in cache.keys] == [1.0, 2.0]
    assert float(cache.keys[0][1, 0, 64:].abs().max()) == 0.0
    cache.reserve(3, 5, 2)
    assert (cache.slots, cache.length) == (4, 1000)


def test_when_memory_is_short_one_long_sequence_does_not_get_many_slots() -> None:
    size = shape()
    cache = KVCache(size, budget=size.bytes_for(64, 64))
    cache.reserve(64, 50, 0)
    cache.keys[0][0] = 7.0
    cache.reserve(1, 900, 1)
    assert (cache.slots, cache.length) == (1, 960)
    assert float(cache.keys[0][0, 1, 63, 3]) == 7.0
    used = sum(t.numel() * 4 for t in (*cache.keys, *cache.values))
    assert used == size.bytes_for(1, 900) <= size.bytes_for(64, 64)


def test_clear_gives_the_memory_back() -> None:
    cache = KVCache(shape(), budget=2**30)
    cache.reserve(8, 100, 0)
    cache.clear()
    assert (cache.slots, cache.length) == (0, 0)
    assert sum(t.numel() for t in cache.keys) == 0


def test_entries_are_the_rows_of_a_token_in_each_head() -> None:
    cache = KVCache(KVShape(1, 2, 4, torch.float32, max_slots=3, max_length=64), budget=2**20)
    cache.reserve(3, 10, live=0)
    positions = torch.tensor([5, 0])
    new = torch.randn(2, 2, 4)
    cache.keys[0].view(-1, 4).index_copy_(0, cache.entries(positions), new.flatten(0, 1))
    assert torch.equal(cache.keys[0][0, :, 5], new[0])
    assert torch.equal(cache.keys[0][1, :, 0], new[1])
    assert cache.keys[0].count_nonzero() == new.numel()
