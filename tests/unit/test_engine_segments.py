"""A response generated in segments, each sent with all that came before, is the one that is generated at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.engines.embedded.kv_cache import Saved
from megatron_rl.engines.embedded.parked import Parked
from megatron_rl.engines.embedded.request import Request
from tests.tiny import tiny_model
from tests.unit.test_engine_scheduler import VOCAB, Rig, request

LENGTH = 24


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("segments"), vocab_size=VOCAB, initializer_range=0.3)


@pytest.fixture(scope="module", params=[True, False], ids=["fixed shapes", "any shapes"])
def rig(request: pytest.FixtureRequest, path: Path) -> Iterator[Rig]:
    made = Rig(path, fixed=request.param)
    yield made
    made.scheduler.stop()
    assert made.scheduler.join(60)


def in_segments(rig: Rig, prompt: list[int], cuts: list[int], seed: int, flush: bool) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probs, int64 and float32 [LENGTH], of segments that end at `cuts` and at the end."""
    parts: list[Request] = []
    tokens = list(prompt)
    for start, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        if flush:
            assert rig.call(rig.scheduler.flush)
        parts.append(request("part", tokens, end - start, seed))
        rig.run([parts[-1]])
        assert parts[-1].cached_tokens == (len(tokens) - 1 if start and not flush else 0)
        tokens += parts[-1].output_ids.tolist()
    return np.concatenate([p.output_ids for p in parts]), np.concatenate([p.log_probs for p in parts])


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24),
    cuts=st.lists(st.integers(1, LENGTH - 1), unique=True, max_size=4).map(sorted),
    seed=st.integers(0, 2**63),
)
def test_segments_are_the_whole_whether_or_not_the_cache_was_kept(
    rig: Rig, prompt: list[int], cuts: list[int], seed: int
) -> None:
    assert rig.call(rig.scheduler.flush)
    whole = request("whole", prompt, LENGTH, seed)
    rig.run([whole])
    for flush in (False, True):
        tokens, log_probs = in_segments(rig, prompt, cuts, seed, flush)
        assert tokens.tolist() == whole.output_ids.tolist()
        if not flush or rig.fixed:  # else what was decoded is computed again by kernels of other shapes
            assert log_probs.tobytes() == whole.log_probs.tobytes()
        np.testing.assert_allclose(log_probs, whole.log_probs, rtol=0, atol=1e-5)


def test_continuing_beside_others_needs_no_prefill(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    firsts = [request(f"a{i}", [4 + i] * (1 + i), 5, i) for i in range(6)]
    rig.run(firsts)
    seen: list[int] = []
    prefill = rig.decoder.prefill
    monkeypatch.setattr(rig.decoder, "prefill", lambda p, s, n: (seen.append(len(p)), prefill(p, s, n))[1])
    rests = [request(f"b{i}", r.tokens.tolist(), 5, i) for i, r in enumerate(firsts)]
    rig.run([request("new", [9, 9], 5), *rests, request("again", rests[0].prompt.tolist(), 5)])
    assert seen == [2]  # the new one, and the second that continues the same sequence
    assert [r.cached_tokens for r in rests] == [len(r.prompt) - 1 for r in rests]
    assert all(len(r.output_ids) == 5 for r in rests)


def test_old_and_surplus_sequences_make_room() -> None:
    parked = Parked(max_sequences=3, budget=100)
    saved = Saved(torch.zeros(5), None)  # 20 bytes
    for i in range(4):
        parked.put(np.array([i]), saved)
    assert parked.take(np.array([0])) is None
    assert parked.take(np.array([1])) is saved
    assert parked.take(np.array([1])) is None
    parked.put(
        np.array([5]), Saved(torch.zeros(18), torch.zeros(4, dtype=torch.int16))
    )  # 80 bytes: one of the other two has to go
    assert parked.take(np.array([2])) is None
    assert parked.take(np.array([3])) is saved
    parked.put(np.array([6]), Saved(torch.zeros(26), None))  # more than there is
    assert len(parked) == 0


def test_new_weights_compute_afresh_what_ended_sequences_left(rig: Rig) -> None:
    first = request("first", [7, 8], 5)
    rig.run([first])
    name = rig.scheduler.version
    rig.call(lambda: rig.scheduler.name_weights("newer"))
    rest = request("rest", first.tokens.tolist(), 5)
    rig.run([rest])
    rig.call(lambda: rig.scheduler.name_weights(name))
    assert rest.cached_tokens == 0
