"""Control calls and weight updates of all engines, against answers that a real engine cannot be made to give."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
from aiohttp import web

from megatron_rl.rollout import control as control_module
from megatron_rl.rollout import weight_update
from megatron_rl.rollout.control import EngineControl
from megatron_rl.rollout.protocol import EngineError, TransportError
from megatron_rl.rollout.weight_update import WeightUpdate
from tests.unit.fake_sglang import FakeEngine, resets, says

T = TypeVar("T")
WEIGHTS = "/weights/v000003"
TRAINERS = np.array([-1.0, -2.0], np.float32)
"""Log-probs of the probe."""
STEPS = [
    "/pause_generation",
    "/flush_cache",
    "/update_weights_from_disk",
    "/weights_checker",
    "/continue_generation",
    "/model_info",
]


def with_engines(engines: list[FakeEngine], action: Callable[[EngineControl], T], **settings: Any) -> T:
    """What `action` returns, in a thread of its own while the engines listen."""

    async def run() -> T:
        for engine in engines:
            await engine.__aenter__()
        logs = {engine.url: Path(f"RUN/logs/engine-{i}.log") for i, engine in enumerate(engines)}
        control = EngineControl([*logs], logs=logs, **{"timeout_s": 5.0, **settings})
        try:
            return await asyncio.to_thread(action, control)
        finally:
            control.close()
            for engine in engines:
                await engine.__aexit__(None, None, None)

    return asyncio.run(run())


def update(*engines: FakeEngine, **settings: Any) -> WeightUpdate | EngineError:
    """What an update of `engines` to version 3 comes to."""

    def action(control: EngineControl) -> WeightUpdate | EngineError:
        try:
            return control.update_from_disk(WEIGHTS, 3)
        except EngineError as error:
            return error

    return with_engines(list(engines), action, **settings)


def silent(engine: FakeEngine) -> FakeEngine:
    """It takes requests and answers none of them."""

    async def hang(_: web.Request) -> web.Response:
        await engine.closing.wait()
        return web.Response()

    engine._handle = hang  # type: ignore[method-assign]
    return engine


def held(result: WeightUpdate | EngineError) -> WeightUpdate:
    assert isinstance(result, WeightUpdate), result
    return result


def checksums(**values: str) -> tuple[int, Any]:
    return 200, {"success": True, "ranks": [{"checksums": values}]}


def test_an_update_takes_its_steps_in_order_on_every_replica() -> None:
    engines = [FakeEngine(), FakeEngine()]
    assert held(update(*engines)).left == [engine.url for engine in engines]
    for engine in engines:
        assert engine.paths() == STEPS
        bodies = dict(engine.requests)
        assert bodies["/pause_generation"] == {"mode": "retract"}
        assert bodies["/update_weights_from_disk"] == {
            "model_path": WEIGHTS,
            "flush_cache": True,
            "abort_all_requests": False,
            "weight_version": "3",
        }


def test_a_replica_reads_a_copy_of_its_own_where_there_is_one() -> None:
    engines = [FakeEngine(), FakeEngine()]
    with_engines(
        engines, lambda c: c.begin_update(3).load_from_disk(WEIGHTS, {c.urls[1]: "/dev/shm/v000003"}, flush=True)
    )
    folders = [dict(engine.requests)["/update_weights_from_disk"]["model_path"] for engine in engines]
    assert folders == [WEIGHTS, "/dev/shm/v000003"]


@pytest.mark.parametrize("step", STEPS)
def test_a_failing_step_costs_its_replica_and_no_other(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_update, "FLUSH_ATTEMPTS", 2)
    good, bad = FakeEngine(), FakeEngine(control={step: (400, {"success": False, "message": "no such directory"})})
    result = held(update(good, bad))
    assert result.left == [good.url]
    assert good.paths() == STEPS or step == "/flush_cache"
    message = str(result.failed[bad.url])
    assert f"step {step.removeprefix('/')} failed" in message
    assert "no such directory" in message
    assert bad.url in message
    assert not set(STEPS[STEPS.index(step) + 1 :]) & set(bad.paths())


def test_an_update_that_is_refused_with_status_200_is_a_failure_too() -> None:
    error = update(FakeEngine(control={"/update_weights_from_disk": (200, {"success": False, "message": "bad shape"})}))
    assert "no engine holds the weights of version 3" in str(error)
    assert "bad shape" in str(error)


def test_the_replica_whose_bytes_differ_from_the_others_is_left_out_and_loses_the_label() -> None:
    engines = [FakeEngine(), FakeEngine(control={"/weights_checker": checksums(w="1", v="other")}), FakeEngine()]
    result = held(update(*engines))
    assert result.left == [engines[0].url, engines[2].url]
    assert "differ in 1 parameters of rank 0, first v" in str(result.failed[engines[1].url])
    assert "/continue_generation" not in engines[1].paths()
    assert engines[1].requests[-1] == (
        "/update_weight_version",
        {"new_version": "-1", "abort_all_requests": False},
    )


def test_of_two_replicas_with_different_bytes_neither_is_believed() -> None:
    good, bad = FakeEngine(), FakeEngine(control={"/weights_checker": checksums(w="1", v="other")})
    error = update(good, bad)
    assert isinstance(error, EngineError)
    assert "do both read the same directory?" in str(error)
    assert "/continue_generation" not in good.paths() + bad.paths()


def test_replicas_of_another_size_are_not_compared() -> None:
    wide = {"success": True, "ranks": [{"checksums": {"w": "left"}}, {"checksums": {"w": "right"}}]}
    engines = [FakeEngine(), FakeEngine(control={"/weights_checker": (200, wide)})]
    assert held(update(*engines)).left == [engine.url for engine in engines]


def test_an_answer_without_checksums_is_a_failure() -> None:
    assert "has no ranks[].checksums" in str(update(FakeEngine(control={"/weights_checker": (200, {"success": True})})))


def test_an_engine_that_reports_another_version_afterwards_is_a_failure() -> None:
    error = update(FakeEngine(control={"/model_info": (200, {"weight_version": "2"})}))
    assert "reports weight_version '2' after the update to 3" in str(error)


def test_an_engine_that_does_not_answer_costs_the_others_no_more_than_the_deadline_of_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_update, "CONTROL_TIMEOUT_S", 0.3)
    good, dead = FakeEngine(), silent(FakeEngine())
    result = held(update(good, dead, timeout_s=60.0))
    assert result.left == [good.url]
    message = str(result.failed[dead.url])
    assert "no answer to /pause_generation within 0.3 s; look at RUN/logs/engine-1.log" in message


def test_an_engine_that_is_gone_is_named() -> None:
    async def gone() -> str:
        async with FakeEngine() as engine:
            return engine.url

    url = asyncio.run(gone())
    with pytest.raises(TransportError, match=f"engine {url}: .*; is it running"):
        EngineControl([url]).update_from_disk("/weights", 1)


def test_an_engine_that_comes_back_is_waited_for() -> None:
    engine = FakeEngine(control={"/ready": (503, {})})

    async def run() -> list[str]:
        async with engine:
            control = EngineControl([engine.url])
            waiting = asyncio.create_task(asyncio.to_thread(control.wait_for_one, time.monotonic() + 60, lambda: False))
            while "/ready" not in engine.paths():
                await asyncio.sleep(0.01)
            engine.recover()
            return await waiting

    assert asyncio.run(run()) == [engine.url]


def refusing() -> FakeEngine:
    """Its answer comes before anybody asks whether the run is to end, as that of an engine that is gone."""
    return FakeEngine(control={"/ready": (503, {})})


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("engine", "call"),
    [
        (lambda: silent(FakeEngine()), lambda control, ending: control.begin_update(3, None, ending).pause("retract")),
        (lambda: silent(FakeEngine()), lambda control, ending: control.wait_for_one(time.monotonic() + 600, ending)),
        (refusing, lambda control, ending: control.wait_for_one(time.monotonic() + 600, ending)),
    ],
    ids=["update", "wait", "wait for one that refuses"],
)
def test_engines_are_waited_for_no_longer_when_the_run_is_to_end(
    engine: Callable[[], FakeEngine], call: Callable[..., object]
) -> None:
    asked = itertools.chain([False], itertools.repeat(True))
    with pytest.raises(EngineError, match="interrupted: the run is to end"):
        with_engines([engine()], lambda c: call(c, lambda: next(asked)), timeout_s=600.0)


def test_calls_to_all_name_every_engine_that_failed() -> None:
    engines = [FakeEngine(control={"/model_info": (500, "x")}) for _ in range(2)]

    def action(control: EngineControl) -> str:
        with pytest.raises(EngineError) as caught:
            control.model_info()
        return str(caught.value)

    message = with_engines(engines, action)
    assert "model_info failed" in message
    assert all(engine.url in message for engine in engines)


def test_each_replica_takes_its_own_steps_until_one_fails() -> None:
    engines = [FakeEngine(), FakeEngine(control={"/pause_generation": (400, {"message": "no"})}), FakeEngine()]

    def action(control: EngineControl) -> dict[str, EngineError | None]:
        both: list[tuple[str, dict[str, Any]]] = [
            ("/pause_generation", {"mode": "abort"}),
            ("/continue_generation", {}),
        ]
        return control.each("a rest", {control.urls[0]: both, control.urls[1]: both, control.urls[2]: both[1:]})

    results = with_engines(engines, action)
    assert [engine.paths() for engine in engines] == [
        ["/pause_generation", "/continue_generation"],
        ["/pause_generation"],
        ["/continue_generation"],
    ]
    assert results[engines[0].url] is results[engines[2].url] is None
    assert "a rest: step pause_generation failed" in str(results[engines[1].url])


REST: list[tuple[str, dict[str, Any]]] = [("/pause_generation", {"mode": "abort"}), ("/continue_generation", {})]


def test_the_steps_of_each_replica_have_one_deadline_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now, left = [100.0], []
    monkeypatch.setattr(control_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def action(control: EngineControl) -> None:
        post = control.calls.post

        def record(path: str, bodies: Any, timeout_s: float) -> Any:
            left.append(timeout_s)
            now[0] += 20.0
            return post(path, bodies, timeout_s)

        control.calls.post = record  # type: ignore[method-assign]
        control.each("a rest", {control.urls[0]: REST}, 50.0)

    with_engines([FakeEngine()], action)
    assert left == [50.0, 30.0]


def test_a_replica_that_is_silent_is_given_up_when_the_run_is_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "STOP_S", 0.0)
    dead = silent(FakeEngine())

    def action(control: EngineControl) -> EngineError | None:
        control.interrupted = lambda: True
        return control.each("a rest", {dead.url: REST}, 600.0)[dead.url]

    error = with_engines([dead], action)
    assert isinstance(error, TransportError)
    assert "given up" in str(error)


def test_waiting_for_engines_ends_when_all_are_ready() -> None:
    engine = FakeEngine(control={"/ready": (503, {})})

    def action(control: EngineControl) -> None:
        with pytest.raises(EngineError, match=r"waiting 0\.3 s for engines failed: .*HTTP 503"):
            control.wait_ready()
        engine.recover()
        control.wait_ready()

    with_engines([engine], action, timeout_s=0.3)


# --------------------------------------------------------------------------------------------------------- the session


def session_with(engine: FakeEngine) -> WeightUpdate:
    def action(control: EngineControl) -> WeightUpdate:
        update = control.begin_update(7)
        update.pause("in_place")
        update.begin()
        update.end()
        return update

    return with_engines([engine], action)


def test_a_session_is_opened_and_closed_around_tensors_and_names_the_version_before_its_end() -> None:
    engine = FakeEngine()
    assert session_with(engine).left == [engine.url]
    assert engine.requests == [
        ("/pause_generation", {"mode": "in_place"}),
        ("/flush_cache", {}),  # once: it is refused where requests keep their cache
        ("/begin_weight_update", {"selector": "all"}),
        ("/update_weight_version", {"new_version": "7", "abort_all_requests": False}),
        ("/end_weight_update", {}),
    ]


def test_a_session_that_somebody_left_open_is_closed_first() -> None:
    class Open(FakeEngine):
        def _succeed(self, path: str, body: Any) -> Any:
            if path == "/begin_weight_update" and "/end_weight_update" not in self.paths():
                return {"success": False, "message": "a weight-update session is already open; call end first"}
            return super()._succeed(path, body)

    engine = Open()
    assert session_with(engine).left == [engine.url]
    assert engine.paths()[2:5] == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]


# ----------------------------------------------------------------------------------------------------------- the probe


def probed(*answers: Any) -> dict[str, str]:
    """Which of the engines with these log-probs (after the first token) fail, as their number -> message."""
    engines = []
    for log_probs in answers:
        entries = [[None, 5, None], *([value, 6, None] for value in log_probs)]
        engines.append(FakeEngine(says(200, {"meta_info": {"input_token_logprobs": entries}})))

    def action(control: EngineControl) -> dict[str, str]:
        update = control.begin_update(1)
        update.probe([5, 6, 6], TRAINERS, 0.05)
        assert set(update.left) == set(control.urls) - set(update.failed)
        return {str(control.urls.index(url)): str(error) for url, error in update.failed.items()}

    return with_engines(engines, action)


def test_log_probs_near_those_of_the_trainer_are_good() -> None:
    assert probed([-1.0, -2.04], [-0.96, -2.0]) == {}


def test_log_probs_far_from_those_of_the_trainer_name_token_values_and_key() -> None:
    found = probed([-1.0, -2.0], [-1.0, -2.1])
    assert found.keys() == {"1"}
    assert "token 2 of the probe is -2.1, the trainer's is -2, further than engine.probe_tolerance=0.05" in found["1"]


@pytest.mark.parametrize("log_probs", [[None, -2.0], [-1.0], [-1.0, -2.0, -3.0], [float("nan"), -1.0]])
def test_an_answer_without_a_number_for_each_token_is_a_failure(log_probs: Any) -> None:
    assert probed(log_probs).keys() == {"0"}


def test_an_engine_that_is_too_busy_for_the_probe_keeps_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_update, "PROBE_TIMEOUT_S", 0.2)
    busy, broken = FakeEngine(), FakeEngine(resets())
    busy.always = busy.hang()

    def action(control: EngineControl) -> WeightUpdate:
        update = control.begin_update(1)
        update.probe([5, 6, 6], TRAINERS, 0.05)
        return update

    update = with_engines([busy, broken], action, timeout_s=60.0)
    assert update.left == [busy.url]
    assert update.failed.keys() == {broken.url}


def test_the_deadline_of_an_update_runs_from_its_beginning() -> None:
    def action(control: EngineControl) -> list[str]:
        update = control.begin_update(1)
        time.sleep(0.2)
        update.resume()
        return update.left

    assert with_engines([FakeEngine()], action, timeout_s=0.1) == []
