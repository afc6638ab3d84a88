"""The running batch keeps rows dense and outputs whole, whatever joins and leaves."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.engines.embedded.batch import Batch
from megatron_rl.engines.embedded.request import Request, Sampling

VOCAB = 100


def request(rid: str, max_new_tokens: int = 1000, stop: tuple[int, ...] = (), prompt: int = 3) -> Request:
    sampling = Sampling(1.0, 1.0, VOCAB, 0.0, max_new_tokens, frozenset(stop), 0)
    return Request(rid, np.arange(prompt), sampling)


def draw(batch: Batch, first: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = (first + np.arange(len(batch))) % VOCAB
    return tokens, -tokens.astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30), st.randoms()), min_size=1, max_size=12))
def test_outputs_survive_any_order_of_joining_and_leaving(rounds: list) -> None:
    batch, slots = Batch(64, VOCAB), [""] * 64  # slots: whose keys and values the cache holds
    expected: dict[str, list[int]] = {}
    counter = 0
    for joining, steps, random in rounds:
        new = [request(f"r{counter + i}") for i in range(min(joining, 64 - len(batch)))]
        counter += len(new)
        rows = batch.add(new)
        for row, r in zip(range(rows.start, rows.stop), new, strict=True):
            slots[row] = r.rid
            expected[r.rid] = []
        for step in range(steps if len(batch) else 0):
            tokens, log_probs = draw(batch, counter + step)
            for r, token in zip(batch.requests, tokens.tolist(), strict=True):
                expected[r.rid].append(token)
            assert batch.record(slice(0, len(batch)), tokens, log_probs) == {}
        leaving = np.array([row for row in range(len(batch)) if random.random() < 0.5], np.int64)
        gone = [batch.requests[row] for row in leaving]
        destinations, sources = batch.release(leaving)
        for destination, source in zip(destinations, sources, strict=True):
            slots[destination] = slots[source]
        assert [r.rid for r in batch.requests] == slots[: len(batch)]
        for r in gone:
            assert r.output_ids.tolist() == expected[r.rid]
            assert r.log_probs.tolist() == [-float(t) for t in expected[r.rid]]
    for row, r in enumerate(batch.requests):
        assert batch.generated(row) == len(expected[r.rid])
        assert batch.positions[row] == len(r.prompt) - 1 + len(expected[r.rid])


def test_stopping_comes_before_length_and_each_row_has_its_own_stop_ids() -> None:
    batch = Batch(8, VOCAB)
    batch.add([request("a", 1, (7,)), request("b", 1, (8,)), request("c", 5, (7, 8)), request("d", 5)])
    reasons = batch.record(slice(0, 4), np.array([7, 7, 7, 7]), np.zeros(4, np.float32))
    assert reasons == {
        0: {"type": "stop", "matched": 7},
        1: {"type": "length", "length": 1},
        2: {"type": "stop", "matched": 7},
    }


def test_a_log_prob_that_is_not_finite_ends_the_row_as_failed() -> None:
    batch = Batch(8, VOCAB)
    batch.add([request("a"), request("b")])
    reasons = batch.record(slice(0, 2), np.array([1, 2]), np.array([-1.0, np.nan], np.float32))
    assert list(reasons) == [1]
    assert (reasons[1]["type"], reasons[1]["status_code"]) == ("abort", 500)


def test_a_retracted_request_goes_on_behind_what_it_had() -> None:
    batch = Batch(4, VOCAB)
    r = request("a", max_new_tokens=75)
    batch.add([r])
    for step in range(70):  # beyond the first block of the output buffers
        assert not batch.record(slice(0, 1), *draw(batch, step))
    batch.release(np.array([0]))
    assert r.tokens.tolist() == [0, 1, 2, *range(70)]
    batch.add([request("other"), r])
    for step in range(70, 74):
        assert not batch.record(slice(0, 2), np.array([0, step]), np.zeros(2, np.float32))
    reasons = batch.record(slice(0, 2), np.array([0, 74]), np.zeros(2, np.float32))
    assert reasons == {1: {"type": "length", "length": 75}}
    batch.release(np.array([1]))
    assert r.output_ids.tolist() == list(range(75))


def test_version_spans_cover_the_output_without_gaps() -> None:
    r = request("a")
    r.output_ids, r.version = np.arange(10), "c"
    r.version_changes = [("a", 0), ("b", 4), ("b", 6), ("x", 6)]
    spans = [(s.version, s.start, s.end) for s in r.version_spans()]
    assert spans == [("a", 0, 0), ("b", 0, 6), ("c", 6, 10)]
    untouched = request("b")
    untouched.version = "v"
    assert [(s.version, s.start, s.end) for s in untouched.version_spans()] == [("v", 0, 0)]
