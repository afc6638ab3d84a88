"""Worker processes between client and engine, and engines that are killed: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.addresses import free_port
from megatron_rl.rollout.client import EngineClient, Limits
from megatron_rl.rollout.connect import connect
from megatron_rl.rollout.protocol import (
    EngineError,
    Generation,
    Prompt,
    RequestLost,
    SamplingSettings,
)
from megatron_rl.rollout.sample import Group, Span, group_name
from megatron_rl.rollout.wire import decode
from megatron_rl.rollout.workers import frames
from megatron_rl.rollout.workers import pool as pool_module
from megatron_rl.rollout.workers.pool import Worker, WorkerExchange
from tests.unit.coded_engine import PROMPT, SETTINGS, VOCABULARY, CodedServer, require_exact, start

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(segment_tokens=8, retries=1000)


@asynccontextmanager
async def served(server: CodedServer) -> AsyncIterator[str]:
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def generate_all(client: EngineClient, groups: list[Group], wanted: SamplingSettings = SETTINGS) -> None:
    async with asyncio.timeout(60):
        await asyncio.gather(*(client.generate(group.samples, wanted) for group in groups))


def require_whole(groups: list[Group]) -> None:
    for group in groups:
        assert not group.unfinished
        for sample in group.samples:
            require_exact(sample)


def test_groups_that_are_generated_through_two_workers_survive_the_loss_of_each_and_a_suspension():
    async def run() -> list[Group]:
        server = CodedServer(pace=lambda: asyncio.sleep(0.001))
        groups = [start(i, 4) for i in range(8)]
        async with served(server) as url:
            async with connect([url], vocab_size=VOCABULARY, limits=LIMITS, workers=2) as client:
                pool = client._exchange
                assert isinstance(pool, WorkerExchange)
                task = asyncio.create_task(generate_all(client, groups))
                for pid in pool.pids:
                    seen = server.requests
                    await until(lambda seen=seen: server.requests > seen + 2)
                    os.kill(pid, signal.SIGKILL)
                client.suspend([group_name(group.id) for group in groups])
                await task
                assert any(group.unfinished for group in groups)
                for sample in (s for group in groups for s in group.samples):
                    require_exact(sample)
                await until(lambda: len(pool.pids) == 2)
                await generate_all(client, groups)
                assert client.transport_errors == 0, "a replica was blamed for the death of a worker"
                pids = pool.pids
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "a worker outlived the client"
        return groups

    require_whole(asyncio.run(run()))


def test_a_stopped_worker_is_ended_and_replaced_and_no_engine_is_blamed(monkeypatch, caplog):
    monkeypatch.setattr(pool_module, "SILENT_S", 0.5)

    async def run() -> list[Group]:
        server = CodedServer(pace=lambda: asyncio.sleep(0.001))
        groups = [start(i, 4) for i in range(8)]
        async with served(server) as url:
            async with connect([url], vocab_size=VOCABULARY, limits=LIMITS, workers=2) as client:
                pool = client._exchange
                assert isinstance(pool, WorkerExchange)
                task = asyncio.create_task(generate_all(client, groups))
                await until(lambda: server.requests > 2)
                stopped = pool.pids[0]
                os.kill(stopped, signal.SIGSTOP)
                await task
                await until(lambda: stopped not in pool.pids and len(pool.pids) == 2)
                assert client.transport_errors == 0, "a replica was blamed for a stopped worker"
                assert f"client worker 0 (pid {stopped}) was silent for 0.5 s" in caplog.text
                assert not Path(f"/proc/{stopped}").exists()
        return groups

    require_whole(asyncio.run(run()))


def test_a_worker_ignores_proxies_and_may_open_a_connection_for_each_request(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    async def run() -> tuple[list[Group], str]:
        groups = [start(0, 2)]
        async with served(CodedServer()) as url:
            async with connect([url], vocab_size=VOCABULARY, workers=1) as client:
                assert isinstance(client._exchange, WorkerExchange)
                await generate_all(client, groups)
                return groups, Path(f"/proc/{client._exchange.pids[0]}/limits").read_text()

    groups, limits = asyncio.run(run())
    require_whole(groups)
    (soft,) = [line.split()[3] for line in limits.splitlines() if line.startswith("Max open files")]
    assert int(soft) >= (min(65536, hard) if hard != resource.RLIM_INFINITY else 65536)


def start_engine(port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.unit.coded_engine", str(port)], cwd=ROOT)


def test_engines_that_are_killed_under_load_cost_at_most_a_segment_and_come_back():
    """First one of two, whose groups go on at the other; then the other: requests wait until one is there again."""

    async def run() -> list[Group]:
        ports = [free_port(), free_port()]
        engines = [start_engine(port) for port in ports]
        groups = [start(i, 4) for i in range(16)]
        try:
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            async with connect(urls, vocab_size=VOCABULARY, limits=LIMITS) as client:
                serving = client.replicas
                await until(lambda: len(serving.serving) == 2)
                tasks = [asyncio.create_task(generate_all(client, groups[k::2])) for k in range(2)]
                await until(lambda: sum(s.response_length for g in groups for s in g.samples) > 60)
                engines[0].kill()
                await until(lambda: serving.serving == urls[1:])
                await until(lambda: sum(s.response_length for g in groups for s in g.samples) > 400)
                engines[1].kill()
                await until(lambda: not serving.serving)
                unfinished = [g for g in groups if g.unfinished]
                engines.append(start_engine(ports[1]))
                await asyncio.gather(*tasks)
                assert unfinished, "the second engine was killed too late"
                assert serving.serving == urls[1:]
        finally:
            for engine in engines:
                engine.kill()
                engine.wait()
        return groups

    require_whole(asyncio.run(run()))


def test_a_worker_ends_when_the_process_that_started_it_is_killed():
    code = f"""
import asyncio
from megatron_rl.rollout.workers.pool import WorkerExchange
async def main():
    async with WorkerExchange(2, {VOCABULARY}) as pool:
        print(*pool.pids, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.communicate()
    asyncio.run(until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids)))


def test_a_worker_that_cannot_start_is_an_error_that_says_how_it_ended(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def run() -> None:
        async with WorkerExchange(1, VOCABULARY):
            pass

    with pytest.raises(EngineError, match=r"client worker \(rollout.client_workers\) did not start: exit status 1"):
        asyncio.run(run())


def test_a_worker_whose_words_cannot_be_read_is_lost_with_its_requests_and_replaced():
    """Its bytes come through the socket as those of a worker would."""

    async def run() -> None:
        async with WorkerExchange(1, VOCABULARY) as pool:
            (worker,), (pid,) = pool._workers, pool.pids
            held = asyncio.Event()
            first, again = (Prompt(f"s000000000-000.000{k}", np.array(PROMPT), 0, 8, SETTINGS) for k in range(2))
            async with served(CodedServer(pace=held.wait)) as url:
                request = asyncio.create_task(pool.generate(url, [first]))
                await until(lambda: bool(worker._answers))
                worker._reader.feed_data(frames.LENGTH.pack(3) + b"???")
                with pytest.raises(RequestLost, match=r"client worker 0 \(pid \d+\) ended"):
                    await request
                held.set()
                await until(lambda: bool(pool.pids))
                assert pool.pids != [pid]
                (answer,) = await pool.generate(url, [again])
                assert len(answer.tokens) == 3

    asyncio.run(run())


def test_no_worker_that_was_being_started_is_left_when_another_one_cannot_be(monkeypatch):
    """The second is still starting when the first has failed."""
    started: list[Worker] = []
    start = Worker.start

    async def one_fails(worker: Worker) -> None:
        started.append(worker)
        if len(started) == 1:
            raise EngineError("no process")
        await start(worker)

    monkeypatch.setattr(Worker, "start", one_fails)

    async def run() -> None:
        with pytest.raises(EngineError, match="no process"):
            async with WorkerExchange(2, VOCABULARY):
                pass
        process = started[1]._process
        assert process is not None
        assert process.returncode is not None, "a process lives on"

    asyncio.run(run())


def test_a_worker_loads_nothing_heavy():
    code = "import sys, megatron_rl.rollout.workers.worker; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not set(loaded.split()) & {"torch", "pydantic", "transformers", "tokenizers", "pyarrow", "sympy"}


tokens = st.lists(st.integers(0, 2**31), max_size=5)


@given(st.lists(st.tuples(tokens.filter(bool), st.integers(0, 2**31)), min_size=1, max_size=4))
def test_a_request_survives_the_trip_through_bytes(entries):
    settings = SamplingSettings(0.7, 99, (2, 3), top_k=5)
    prompts = [
        Prompt(f"r{i}", np.array(ids, np.int64), seed, i, settings, f"{i}") for i, (ids, seed) in enumerate(entries)
    ]
    body = frames.request(7, "http://a", prompts)
    url, back = frames.from_request(*decode(body[frames.LENGTH.size :]))
    assert url == "http://a"
    for prompt, other in zip(prompts, back, strict=True):
        assert prompt._replace(tokens=None) == other._replace(tokens=None)
        assert prompt.tokens.tolist() == other.tokens.tolist()


@given(st.lists(tokens, min_size=1, max_size=4))
def test_an_answer_survives_the_trip_through_bytes(parts):
    given_answers = [
        Generation(
            np.array(ids, np.int64), -np.arange(len(ids), dtype=np.float32), [Span(3, 0, len(ids))], "stop", "why"
        )
        for ids in parts
    ]
    back = frames.from_answer(*decode(frames.answer(1, given_answers)[frames.LENGTH.size :]))
    for one, other in zip(given_answers, back, strict=True):
        np.testing.assert_equal(other._asdict(), one._asdict())


@pytest.mark.parametrize("kind", list(frames.KINDS))
def test_an_error_keeps_its_kind_and_its_words(kind):
    body = frames.failure(1, kind("engine http://a: said no"))
    with pytest.raises(EngineError, match=r"^engine http://a: said no$") as caught:
        frames.from_answer(*decode(body[frames.LENGTH.size :]))
    assert type(caught.value) is kind
