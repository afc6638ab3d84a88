"""The scheduler thread by itself: sharing of prompts, memory limits, and what a failing model leads to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.engines.embedded.decoder import Decoder
from megatron_rl.engines.embedded.fixed_shapes import FixedShapeDecoder
from megatron_rl.engines.embedded.forward import ForwardPass
from megatron_rl.engines.embedded.request import Request, Sampling
from megatron_rl.engines.embedded.scheduler import Scheduler
from megatron_rl.engines.embedded.weights import Weights, load_model
from tests.tiny import tiny_model

VOCAB = 60
DEADLINE_S = 60


def request(rid: str, prompt: Sequence[int], max_new_tokens: int = 8, seed: int = 0) -> Request:
    sampling = Sampling(1.0, 1.0, VOCAB, 0.0, max_new_tokens, frozenset(), seed)
    return Request(rid, np.array(prompt, np.int64), sampling)


class Rig:
    """A scheduler of a tiny model, and the requests that it has finished."""

    def __init__(self, path: Path, budget: int = 2**28, fixed: bool = False, routes: bool = False) -> None:
        self.model, self.fixed = load_model(str(path), "float32"), fixed
        kind = FixedShapeDecoder if fixed else Decoder
        self.decoder = kind(ForwardPass(self.model), 32, 256, budget, routes)
        self.failed = threading.Event()
        self._left, self._done = 0, threading.Event()
        self.scheduler = Scheduler(self.decoder, "v0", 32, self._finished, self.failed.set)
        self.weights = Weights(self.model)
        self.scheduler.start()

    def _finished(self, requests: Sequence[Request]) -> None:
        self._left -= len(requests)
        if not self._left:
            self._done.set()

    def run(self, requests: Sequence[Request]) -> None:
        """Submit and wait until all have finished."""
        self._left = len(requests)
        self._done.clear()
        self.scheduler.submit(requests)
        assert self._done.wait(DEADLINE_S), "the scheduler did not finish the requests"

    def call(self, function: Callable[[], Any]) -> Any:
        """Run in the scheduler's thread."""
        future: Future[Any] = self.scheduler.call(function)
        return future.result(DEADLINE_S)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("scheduler"), vocab_size=VOCAB, initializer_range=0.3)


@pytest.fixture
def rigs() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*args: Any, **kwargs: Any) -> Rig:
        made.append(Rig(*args, **kwargs))
        return made[-1]

    yield make
    for rig in made:
        rig.scheduler.stop()
        assert rig.scheduler.join(DEADLINE_S), "the scheduler does not end"


def test_equal_prompts_are_computed_once(path: Path, rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rigs(path)
    seen: list[int] = []
    prefill = rig.decoder.prefill
    monkeypatch.setattr(rig.decoder, "prefill", lambda p, s, n: (seen.append(len(p)), prefill(p, s, n))[1])
    requests = [request(f"r{i}", [5, 6, 7 + i % 3], seed=i) for i in range(12)]
    rig.run(requests)
    assert seen == [3]
    assert sorted(r.cached_tokens for r in requests) == [0] * 3 + [2] * 9
    assert len({tuple(r.output_ids) for r in requests}) > 6


def test_results_do_not_depend_on_how_many_run_at_once(path: Path, rigs: Callable[..., Rig]) -> None:
    rig = rigs(path, fixed=True)
    make = lambda: [request(f"r{i}", range(4, 5 + i), 30 - i, seed=i) for i in range(20)]  # noqa: E731
    together, singly = make(), make()
    rig.run(together)
    for one in singly:
        rig.run([one])
    for a, b in zip(together, singly, strict=True):
        assert a.output_ids.tolist() == b.output_ids.tolist()
        assert a.log_probs.tobytes() == b.log_probs.tobytes()


def test_memory_bounds_how_many_run_but_all_get_done(path: Path, rigs: Callable[..., Rig]) -> None:
    unlimited = rigs(path)
    budget = unlimited.decoder.cache.shape.bytes_for(3, 200)
    rig = rigs(path, budget=budget)
    most = 0
    record = rig.scheduler._batch.record

    def watch(*args: Any) -> Any:
        nonlocal most
        most = max(most, len(rig.scheduler._batch))
        return record(*args)

    rig.scheduler._batch.record = watch  # type: ignore[method-assign]
    rig.run([request(f"r{i}", [4 + i] * 100, 100, seed=i) for i in range(8)])
    assert most == 3
    rig.run([request("long", [5] * 10, 240)])  # more than the budget allows for three is fine for one


def test_weights_with_nan_fail_the_requests_and_not_the_engine(path: Path, rigs: Callable[..., Rig]) -> None:
    rig = rigs(path)
    broken = [request("a", range(4, 24)), request("b", range(5, 30))]
    rig.call(lambda: rig.model.model.layers[0].self_attn.v_proj.weight.fill_(float("nan")))
    rig.run(broken)
    for r in broken:
        assert r.finish_reason is not None
        assert r.finish_reason["status_code"] == 500
        assert "not finite" in r.finish_reason["message"]
    rig.call(lambda: rig.weights.update(str(path)))
    healthy = [request("c", [5, 6]), request("d", [7])]  # shorter, in the same slots, whose cache was not flushed
    rig.run(healthy)
    for r in healthy:
        assert r.finish_reason == {"type": "length", "length": 8}
        assert np.isfinite(r.log_probs).all()
    assert not rig.failed.is_set()


@pytest.mark.parametrize("step", ["decode", "prefill", "prompt_log_probs", "move"])
def test_an_error_in_the_loop_ends_every_request_present_and_later(
    path: Path, rigs: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    rig = rigs(path)

    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(rig.decoder, step, fail)
    present = [request("a", [5, 6], 1), request("b", [7]), request("c", [8])]
    present[1].scored = True
    rig.run(present)
    assert rig.failed.wait(DEADLINE_S)
    later = request("d", [8])
    rig.run([later])
    if step == "decode":
        assert present.pop(0).finish_reason == {"type": "length", "length": 1}  # was done before
    for r in (*present, later):
        assert r.finish_reason is not None
        assert r.finish_reason["status_code"] == 500
        assert "out of memory" in r.finish_reason["message"]
    with pytest.raises(RuntimeError, match="out of memory"):
        rig.call(rig.weights.checksums)
