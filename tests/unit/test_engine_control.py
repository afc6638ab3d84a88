"""The weight update of all engines, against answers that a real engine cannot be made to give."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.rollout.control import EngineControl
from megatron_rl.rollout.protocol import EngineError
from tests.unit.fake_sglang import FakeEngine


def update(*engines: FakeEngine, timeout_s: float = 5.0) -> Any:
    """The exception of an update of `engines` to version 3, or None."""

    async def run() -> Any:
        async with asyncio.TaskGroup() as _:
            for engine in engines:
                await engine.__aenter__()
            try:
                logs = {engine.url: Path(f"RUN/logs/engine-{i}.log") for i, engine in enumerate(engines)}
                control = EngineControl([*logs], timeout_s=timeout_s, logs=logs)
                await asyncio.to_thread(control.update_from_disk, "/weights/v000003", 3)
            except EngineError as error:
                return error
            finally:
                for engine in engines:
                    await engine.__aexit__(None, None, None)
        return None

    return asyncio.run(run())


STEPS = [
    "/pause_generation",
    "/flush_cache",
    "/update_weights_from_disk",
    "/weights_checker",
    "/continue_generation",
    "/model_info",
]


def test_an_update_takes_its_steps_in_order_on_every_replica():
    engines = [FakeEngine(), FakeEngine()]
    assert update(*engines) is None
    for engine in engines:
        assert engine.paths() == STEPS
        bodies = dict(engine.requests)
        assert bodies["/pause_generation"] == {"mode": "retract"}
        assert bodies["/update_weights_from_disk"] == {
            "model_path": "/weights/v000003",
            "flush_cache": True,
            "abort_all_requests": False,
            "weight_version": "3",
        }


@pytest.mark.parametrize("step", STEPS)
def test_a_failing_step_is_named_with_its_engine_and_what_follows_is_not_done(step, monkeypatch):
    monkeypatch.setattr("megatron_rl.rollout.control.FLUSH_ATTEMPTS", 2)
    good, bad = FakeEngine(), FakeEngine(control={step: (400, {"success": False, "message": "no such directory"})})
    error = update(good, bad)
    assert f"step {step.removeprefix('/')} failed" in str(error)
    assert "no such directory" in str(error)
    assert bad.url in str(error)
    assert good.url not in str(error)
    after = STEPS[STEPS.index(step) + 1 :]
    assert not set(after) & set(good.paths())


def test_an_update_that_is_refused_with_status_200_is_a_failure_too():
    error = update(FakeEngine(control={"/update_weights_from_disk": (200, {"success": False, "message": "bad shape"})}))
    assert "bad shape" in str(error)


def test_replicas_that_hold_different_bytes_are_not_continued():
    ranks = [{"checksums": {"w": "1", "v": "other"}}]
    good, bad = FakeEngine(), FakeEngine(control={"/weights_checker": (200, {"success": True, "ranks": ranks})})
    error = update(good, bad)
    assert "differ in 1 parameters of rank 0, first v" in str(error)
    assert "/continue_generation" not in good.paths()


def test_an_engine_that_reports_another_version_afterwards_is_a_failure():
    error = update(FakeEngine(control={"/model_info": (200, {"weight_version": "2"})}))
    assert "reports weight_version '2' after the update to 3" in str(error)


def test_an_engine_that_does_not_answer_is_named_at_the_deadline():
    good, dead = FakeEngine(), FakeEngine()

    async def hang(request: Any) -> Any:
        await dead.closing.wait()

    dead._handle = hang  # type: ignore[method-assign]
    error = update(good, dead, timeout_s=0.3)
    assert "step pause_generation: not finished within 0.3 s" in str(error)
    assert "look at RUN/logs/engine-1.log;" in str(error)
    assert dead.url in str(error)
    assert good.url not in str(error)


def test_an_engine_that_is_gone_is_named():
    async def gone() -> str:
        async with FakeEngine() as engine:
            return engine.url

    url = asyncio.run(gone())
    with pytest.raises(EngineError, match=f"engine {url}: .*; is it running"):
        EngineControl([url]).update_from_disk("/weights", 1)


def test_an_update_begins_again_with_all_replicas_when_one_was_away():
    async def run() -> tuple[list[str], list[str], str | None]:
        engine, other = FakeEngine(control={"/flush_cache": (503, {})}), FakeEngine()
        async with engine, other:
            control = EngineControl([engine.url, other.url], patience_s=60.0)
            update = asyncio.create_task(asyncio.to_thread(control.update_from_disk, "/weights/v000003", 3))
            while "/ready" not in engine.paths():  # it has noticed
                await asyncio.sleep(0.01)
            engine.recover()
            await update
            return engine.paths(), other.paths(), engine.loaded

    paths, others, loaded = asyncio.run(run())
    assert loaded == "3"
    assert paths[:2] == others[:2] == STEPS[:2]
    assert paths[-len(STEPS) :] == others[-len(STEPS) :] == STEPS


def test_an_update_that_waits_for_an_engine_is_given_up_when_the_run_is_to_end() -> None:
    asked = iter([False, True])
    control = EngineControl(["http://127.0.0.1:9"], timeout_s=600.0, patience_s=600.0)
    with pytest.raises(EngineError, match=r"weight update to version 3 .* failed: interrupted"):
        control.update_from_disk("/weights/v000003", 3, lambda: next(asked))
