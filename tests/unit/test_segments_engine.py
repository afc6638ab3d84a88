"""Responses in segments at a real engine: a short segment changes nothing but the number of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from megatron_rl.rollout import replicas as replicas_module
from megatron_rl.rollout.client import Limits
from megatron_rl.rollout.connect import connect
from megatron_rl.rollout.protocol import SamplingSettings
from megatron_rl.rollout.sample import Group, group_name
from tests.tiny import tiny_model
from tests.unit.rollout_rig import deterministic_engine

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = SamplingSettings(temperature=1.0, max_new_tokens=24, stop_token_ids=(5,))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a deterministic engine."""
    folder = tmp_path_factory.mktemp("engine")
    model = tiny_model(folder / "m", vocab_size=64, layers=1, max_position_embeddings=64)
    with deterministic_engine(folder, model) as url:
        yield url


def groups() -> list[Group]:
    prompts = [np.array([3, 9, 4 + i], np.int64) for i in range(4)]
    return [Group.start(i, "p", p, 4, run_seed=1, version=0, temperature=1.0) for i, p in enumerate(prompts)]


def generated(engine: str, segment: int, suspend: bool = False, workers: int = 0) -> list[Group]:
    """Four groups; `suspend`: again and again, until nothing is left to suspend."""

    async def run() -> list[Group]:
        made = groups()
        limits = Limits(segment_tokens=segment, context_length=57)
        async with connect([engine], vocab_size=64, limits=limits, workers=workers) as client:
            while any(group.unfinished for group in made):
                tasks = [asyncio.create_task(client.generate(group.samples, SETTINGS)) for group in made]
                if suspend:
                    have = sum(s.response_length for group in made for s in group.samples)
                    while not all(task.done() for task in tasks):
                        await asyncio.sleep(0.005)
                        if sum(s.response_length for group in made for s in group.samples) > have + 20:
                            client.suspend([group_name(group.id) for group in made])
                await asyncio.gather(*tasks)
        return made

    return asyncio.run(run())


@pytest.mark.parametrize(("segment", "suspend", "workers"), [(3, False, 0), (5, True, 0), (4, True, 1)])
def test_segments_and_suspensions_give_the_bits_of_the_response_that_is_made_at_once(engine, segment, suspend, workers):
    whole = generated(engine, 100)
    parts = generated(engine, segment, suspend, workers)
    for group, other in zip(whole, parts, strict=True):
        for one, two in zip(group.samples, other.samples, strict=True):
            assert one.attempts == 1
            assert one.response_length <= segment or two.attempts > 1
            assert one.finish_reason == two.finish_reason
            np.testing.assert_array_equal(one.response_tokens, two.response_tokens)
            np.testing.assert_array_equal(one.log_probs, two.log_probs)
            assert one.spans == two.spans


@asynccontextmanager
async def failing_every_second_time(engine: str) -> AsyncIterator[str]:
    """What stands before an engine: its second, fourth, ... answer to /generate is lost on the way, as HTTP 500."""
    count = 0

    async def forward(request: web.Request) -> web.Response:
        nonlocal count
        body = await request.read()
        async with session.request(request.method, engine + request.path_qs, data=body) as response:
            answer, status = await response.read(), response.status
        if request.path == "/generate":
            count += 1
            if count % 2 == 0:
                return web.json_response({"error": {"message": "out of memory"}}, status=500)
        return web.Response(body=answer, status=status, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as session:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()


def test_responses_are_the_same_to_the_bit_when_one_replica_fails_now_and_then(engine, monkeypatch):
    monkeypatch.setattr(replicas_module, "REST_S", 0.05)
    monkeypatch.setattr(replicas_module, "POLL_S", 0.02)

    async def run() -> tuple[list[Group], int]:
        made = groups()
        limits = Limits(segment_tokens=5, context_length=57, retries=9)
        async with failing_every_second_time(engine) as failing:
            async with connect([failing, engine], vocab_size=64, limits=limits) as client:
                client.replicas.publish(0, [failing, engine])
                await asyncio.gather(*(client.generate(group.samples, SETTINGS) for group in made))
                return made, client.transport_errors

    made, failures = asyncio.run(run())
    assert failures > 0
    for mine, whole in zip(made, generated(engine, 100), strict=True):
        for a, b in zip(mine.samples, whole.samples, strict=True):
            assert a.response_tokens.tolist() == b.response_tokens.tolist()
            assert a.log_probs.tobytes() == b.log_probs.tobytes()
