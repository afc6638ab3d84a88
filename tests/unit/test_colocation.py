"""Whose turn it is on shared devices: what engines are told and in which order, and which of them are left alone."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megatron_rl.cluster.engine_process import Engine, RestartLimit
from megatron_rl.cluster.rank_zero import RankZero
from megatron_rl.cluster.run_dir import RunDir
from megatron_rl.cluster.turn import engines_may_start, set_turn
from megatron_rl.colocation import KV_CACHE, WEIGHTS, EngineMemory, SharedDevices
from megatron_rl.rollout.control import EngineControl
from megatron_rl.rollout.protocol import EngineError
from tests.unit.fake_sglang import FakeEngine

PAUSE = ("/pause_generation", {"mode": "retract"})
CONTINUE = ("/continue_generation", {})


def release(*tags: str) -> tuple[str, Any]:
    return "/release_memory_occupation", {"tags": [*tags]}


def resume(*tags: str) -> tuple[str, Any]:
    return "/resume_memory_occupation", {"tags": [*tags]}


class Store(dict):
    """What rank 0 needs of torch's store."""

    set = dict.__setitem__

    def delete_key(self, key: str) -> bool:
        return self.pop(key, None) is not None


class Rig:
    """Engines that succeed at everything, a rank 0, and a training state that writes down where it is."""

    def __init__(self, run_dir: Path, urls: list[str]) -> None:
        self.run, self.moves = RunDir(run_dir), []
        self.run.endpoints.mkdir(parents=True, exist_ok=True)
        for replica, url in enumerate(urls):
            self.publish(replica, url, pid=100 + replica)
        self.memory = EngineMemory(EngineControl(urls, timeout_s=5.0), self.run)
        self.memory.release_all()
        zero = RankZero(Store(), 0)  # type: ignore[arg-type]
        self.devices = SharedDevices(self, self.memory, zero, 5.0, 1.0, barrier=lambda: self.moves.append("barrier"))

    def publish(self, replica: int, url: str, pid: int) -> None:
        self.run.engine_endpoint(replica).write_text(json.dumps({"url": url, "pid": pid}))

    def to_host(self) -> int:
        self.moves.append("host")
        return 0

    def to_device(self) -> None:
        self.moves.append("device")

    def begin_sampling(self) -> None:
        """As a weight update does."""
        self.devices.to_engines()
        self.devices.weights_are_loaded()


def with_engines(tmp_path: Path, check: Callable[[Rig, list[FakeEngine]], None], *engines: FakeEngine) -> None:
    """Calls `check` in a thread while the engines (two good ones) run."""

    async def run() -> None:
        used = list(engines) or [FakeEngine(), FakeEngine()]
        for engine in used:
            await engine.__aenter__()
        try:
            await asyncio.to_thread(lambda: check(Rig(tmp_path, [engine.url for engine in used]), used))
        finally:
            for engine in used:
                await engine.__aexit__(None, None, None)

    asyncio.run(run())


def test_the_turns_of_two_steps_are_told_in_order(tmp_path: Path) -> None:
    def check(rig: Rig, engines: list[FakeEngine]) -> None:
        for _ in range(2):
            rig.begin_sampling()
            rig.devices.to_trainer()
            rig.devices.to_trainer()  # again in the same turn
        turn = [resume(WEIGHTS), resume(KV_CACHE), PAUSE, release(KV_CACHE, WEIGHTS)]
        for engine in engines:
            assert engine.requests == [PAUSE, release(KV_CACHE, WEIGHTS), *turn, *turn]
        assert rig.moves == ["host", "barrier", "device"] * 2

    with_engines(tmp_path, check)


def test_weights_that_are_published_twice_in_one_turn_take_memory_once(tmp_path: Path) -> None:
    def check(rig: Rig, engines: list[FakeEngine]) -> None:
        rig.begin_sampling()
        rig.begin_sampling()
        assert engines[0].requests[2:] == [resume(WEIGHTS), resume(KV_CACHE)]
        assert rig.moves == ["host", "barrier"]

    with_engines(tmp_path, check)


def test_a_checkpoint_in_the_engines_turn_borrows_the_memory_of_their_caches(tmp_path: Path) -> None:
    def check(rig: Rig, engines: list[FakeEngine]) -> None:
        rig.begin_sampling()
        with rig.devices.training_state():
            rig.moves.append("save")
            assert engines[1].requests[-2:] == [PAUSE, release(KV_CACHE)]
        assert engines[1].requests[-2:] == [resume(KV_CACHE), CONTINUE]
        rig.devices.to_trainer()
        with rig.devices.training_state():
            rig.moves.append("save")
        assert rig.moves == ["host", "barrier", "device", "save", "host", "barrier", "device", "save"]

    with_engines(tmp_path, check)


def test_an_engine_that_died_while_its_memory_was_released_is_not_told_to_take_it_back(tmp_path: Path) -> None:
    def check(rig: Rig, engines: list[FakeEngine]) -> None:
        assert not engines_may_start(rig.run.endpoints)
        rig.publish(0, engines[0].url, pid=200)  # it was started again
        rig.begin_sampling()
        assert engines_may_start(rig.run.endpoints)
        assert engines[0].requests[2:] == []
        assert engines[1].requests[2:] == [resume(WEIGHTS), resume(KV_CACHE)]
        rig.devices.to_trainer()
        assert engines[0].requests[2:] == [PAUSE, release(KV_CACHE, WEIGHTS)]

    with_engines(tmp_path, check)


def test_one_that_cannot_be_reached_has_no_memory_and_stops_nobody(tmp_path: Path) -> None:
    async def run() -> None:
        async with FakeEngine() as gone, FakeEngine() as left:
            rig = await asyncio.to_thread(Rig, tmp_path, [gone.url, left.url])
            await asyncio.to_thread(rig.begin_sampling)
            await gone._runner.cleanup()
            await asyncio.to_thread(rig.devices.to_trainer)
            await asyncio.to_thread(rig.begin_sampling)
            assert left.requests[-2:] == [resume(WEIGHTS), resume(KV_CACHE)]

    asyncio.run(run())


def test_one_that_keeps_its_memory_ends_the_run_but_does_not_keep_it_from_being_saved(tmp_path: Path) -> None:
    def check(rig: Rig, engines: list[FakeEngine]) -> None:
        rig.begin_sampling()
        engines[0]._control = {"/release_memory_occupation": (400, {"message": "not idle"})}
        with rig.devices.training_state():
            rig.moves.append("save")
        assert rig.moves[-4:] == ["device", "save", "host", "barrier"]
        with pytest.raises(EngineError, match=f"release of device memory.*{engines[0].url}.*not idle"):
            rig.devices.to_trainer()

    with_engines(tmp_path, check)


def test_one_that_refuses_leaves_the_others_with_their_memory_and_at_work(tmp_path: Path) -> None:
    def check(rig: Rig, engines: list[FakeEngine]) -> None:
        rig.begin_sampling()
        engines[0]._control = {"/release_memory_occupation": (400, {"message": "not idle"})}
        with rig.devices.training_state():
            pass
        assert engines[0].requests[-3:] == [PAUSE, release(KV_CACHE), CONTINUE]
        assert engines[1].requests[-4:] == [PAUSE, release(KV_CACHE), resume(KV_CACHE), CONTINUE]

    with_engines(tmp_path, check)


def test_memory_that_was_taken_back_is_not_asked_back_again_since_another_engine_refused(tmp_path: Path) -> None:
    def check(rig: Rig, engines: list[FakeEngine]) -> None:
        rig.begin_sampling()
        engines[0]._control = {"/resume_memory_occupation": (400, {"message": "out of memory"})}
        with rig.devices.training_state():
            pass
        assert CONTINUE not in engines[0].requests  # it would compute without a cache
        engines[0].recover()
        rig.devices.weights_are_loaded()
        assert engines[0].requests[-2:] == [resume(KV_CACHE)] * 2
        assert engines[1].requests[-2:] == [resume(KV_CACHE), CONTINUE]

    with_engines(tmp_path, check)


class Silent(FakeEngine):
    """Gives no answer to requests of one path."""

    path = ""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        answer = await super()._handle(request)
        if request.path == self.path:
            await self.closing.wait()
        return answer


def test_nothing_is_asked_of_the_memory_of_one_that_gave_no_answer_until_it_was_started_again(tmp_path: Path) -> None:
    def check(rig: Rig, engines: list[FakeEngine]) -> None:
        rig.devices._brief_s = 0.4
        rig.begin_sampling()
        assert isinstance(engines[1], Silent)
        engines[1].path = "/release_memory_occupation"
        with rig.devices.training_state():
            pass
        assert engines[1].requests[-3:] == [PAUSE, release(KV_CACHE), CONTINUE]
        rig.devices.to_trainer()
        rig.begin_sampling()
        assert engines[1].requests[-3:] == [PAUSE, release(KV_CACHE), CONTINUE]
        assert engines[0].requests[-4:] == [PAUSE, release(KV_CACHE, WEIGHTS), resume(WEIGHTS), resume(KV_CACHE)]
        engines[1].path = ""
        rig.publish(1, engines[1].url, pid=200)
        rig.devices.to_trainer()
        assert engines[1].requests[-2:] == [PAUSE, release(KV_CACHE, WEIGHTS)]

    with_engines(tmp_path, check, FakeEngine(), Silent())


def test_a_dead_engine_waits_for_the_engines_turn_before_it_is_started_again(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    (tmp_path / "endpoint").write_text("{}")
    may_start = lambda: engines_may_start(tmp_path)  # noqa: E731
    engine = Engine("the engine", argv, tmp_path / "endpoint", RestartLimit(1, 60.0), may_start=may_start)
    engine.start()
    first = engine.process
    assert isinstance(first, subprocess.Popen)
    set_turn(tmp_path, trainer=True)
    first.kill()
    first.wait(60)
    for _ in range(3):
        assert engine.may_go_on()
        assert engine.process is first
    set_turn(tmp_path, trainer=False)
    assert engine.may_go_on()
    assert engine.process is not first
    engine.stop()
    engine.end(time.monotonic() + 60)
