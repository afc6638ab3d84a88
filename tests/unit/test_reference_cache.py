"""The cache of reference log-probs."""

from __future__ import annotations

import numpy as np

from megatron_rl.policy.batch import SequenceBatch
from megatron_rl.policy.reference import LogProbCache


def make_batch(names: str, lengths: list[int], temperature: float = 1.0) -> SequenceBatch:
    masks = [[0] + [1] * (n - 1) for n in lengths]
    return SequenceBatch.from_sequences([[1] * n for n in lengths], masks, list(names), temperature)


def test_known_sequences_come_back_in_the_order_asked_for():
    cache = LogProbCache()
    cache.put(make_batch("abc", [2, 3, 4]), np.arange(9, dtype=np.float32))
    assert cache.get(make_batch("ca", [4, 2])).tolist() == [5, 6, 7, 8, 0, 1]


def test_one_unknown_sequence_is_a_miss():
    cache = LogProbCache()
    cache.put(make_batch("a", [2]), np.zeros(2, dtype=np.float32))
    assert cache.get(make_batch("ab", [2, 2])) is None


def test_another_temperature_or_length_is_a_miss():
    cache = LogProbCache()
    cache.put(make_batch("a", [3]), np.zeros(3, dtype=np.float32))
    assert cache.get(make_batch("a", [3], temperature=0.7)) is None
    assert cache.get(make_batch("a", [4])) is None


def test_the_least_recently_used_go_first_when_full():
    cache = LogProbCache(max_tokens=6)
    cache.put(make_batch("ab", [3, 3]), np.zeros(6, dtype=np.float32))
    assert cache.get(make_batch("a", [3])) is not None
    cache.put(make_batch("c", [3]), np.zeros(3, dtype=np.float32))
    assert cache.get(make_batch("b", [3])) is None
    assert cache.get(make_batch("ac", [3, 3])) is not None


def test_the_same_sequence_again_does_not_take_room_twice():
    cache = LogProbCache(max_tokens=6)
    for value in range(5):
        cache.put(make_batch("ab", [3, 3]), np.full(6, value, dtype=np.float32))
    assert cache.get(make_batch("ab", [3, 3])).tolist() == [4] * 6


def test_later_changes_of_the_callers_array_do_not_reach_the_cache():
    cache = LogProbCache()
    values = np.zeros(2, dtype=np.float32)
    cache.put(make_batch("a", [2]), values)
    values[:] = 9
    assert cache.get(make_batch("a", [2])).tolist() == [0, 0]


def test_a_batch_without_sequences_is_remembered_and_found():
    cache = LogProbCache()
    empty = make_batch("a", [2]).select([])
    cache.put(empty, np.zeros(0, dtype=np.float32))
    assert cache.get(empty).tolist() == []
