"""Routes of responses in segments: every row is that of its own token and layer, whatever comes between."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rollout import client as client_module
from megatron_rl.rollout.connect import connect
from megatron_rl.rollout.sample import Group, Sample, group_name
from megatron_rl.rollout.workers.pool import WorkerExchange
from megatron_rl.routes import RouteStore
from tests.unit.coded_engine import (
    LONGEST,
    SETTINGS,
    VOCABULARY,
    CodedExchange,
    CodedServer,
    format_in,
    length_of,
    number_of,
    require_exact,
    require_exact_routes,
    start,
    token_of,
)
from tests.unit.test_client_workers import LIMITS, generate_all, require_whole, served, until
from tests.unit.test_segments import ACTIONS, engines, put_back, suspended_when_held, through_a_checkpoint

WANTED = replace(SETTINGS, routes="pack")


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LOST_PAUSE_S", 0.0)


@settings(max_examples=150, deadline=None)
@given(
    script=st.lists(st.sampled_from([*ACTIONS, "unrouted"]), max_size=40),
    size=st.integers(1, 4),
    segment=st.integers(1, 50),
    first=st.integers(0, 30),
    workers=st.integers(1, 3),
    checkpoints=st.booleans(),
)
def test_every_row_is_that_of_its_token_whatever_comes_between_segments(
    tmp_path_factory, script, size, segment, first, workers, checkpoints
):
    form = format_in(tmp_path_factory.mktemp("routes"))
    reader = form.store()

    async def run() -> None:
        exchange = CodedExchange(script, [form.store() for _ in range(workers)])
        group = start(first, size)
        async with engines(exchange, segment_tokens=segment) as client:
            monitor = asyncio.create_task(put_back(client, exchange))
            while group.unfinished:
                await suspended_when_held(client, exchange, group, WANTED)
                for sample in group.samples:
                    require_exact(sample)
                    require_exact_routes(sample, reader)
                if checkpoints:
                    group = through_a_checkpoint(group)
            monitor.cancel()

    asyncio.run(run())


@settings(max_examples=50, deadline=None)
@given(turns=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=4), data=st.data())
def test_what_an_environment_says_is_routed_by_the_answer_that_reads_it(tmp_path_factory, turns, data):
    form = format_in(tmp_path_factory.mktemp("routes"))
    script = data.draw(st.lists(st.sampled_from(["whole", "aborted", "unrouted", "lost"]), max_size=12))

    async def run() -> Sample:
        exchange = CodedExchange(script, [form.store()])
        (sample,) = start(data.draw(st.integers(0, 30)), 1).samples
        whole = length_of(number_of(sample.id))
        async with engines(exchange, segment_tokens=4) as client:
            monitor = asyncio.create_task(put_back(client, exchange))
            for said, heard in turns:
                limit = sample.response_length + said
                if limit + heard >= min(whole, LONGEST):
                    break
                await client.generate([sample], replace(WANTED, max_new_tokens=limit))
                sample.reopen()
                have = sample.response_length
                sample.append_observation([token_of(number_of(sample.id), have + i, 0) for i in range(heard)])
                require_exact_routes(sample, form.store())
            await client.generate([sample], WANTED)
            monitor.cancel()
        return sample

    require_exact_routes(asyncio.run(run()), form.store())


def test_routes_survive_the_loss_of_every_worker_and_a_suspension(tmp_path: Path) -> None:
    """The workers write the files themselves; what a killed one had written and not told is generated anew."""
    form = format_in(tmp_path / "routes")

    async def run() -> list[Group]:
        going = asyncio.Event()
        going.set()

        async def pace() -> None:
            await asyncio.sleep(0.001)
            await going.wait()

        server = CodedServer(pace)
        groups = [start(i, 4) for i in range(8)]
        async with served(server) as url:
            options: dict[str, Any] = {"vocab_size": VOCABULARY, "limits": LIMITS, "workers": 2, "routes": form}
            async with connect([url], **options) as client:
                pool = client._exchange
                assert isinstance(pool, WorkerExchange)
                task = asyncio.create_task(generate_all(client, groups, WANTED))
                for pid in pool.pids:
                    asked = server.requests
                    await until(lambda asked=asked: server.requests > asked + 4)
                    os.kill(pid, signal.SIGKILL)
                    going.clear()  # or all would be over before the next one is there
                    await until(lambda pid=pid: len(pool.pids) == 2 and pid not in pool.pids)
                    going.set()
                client.suspend([group_name(group.id) for group in groups])
                await task
                for sample in (sample for group in groups for sample in group.samples):
                    require_exact_routes(sample, form.store())
                await generate_all(client, groups, WANTED)
        return groups

    groups = asyncio.run(run())
    require_whole(groups)
    for sample in (sample for group in groups for sample in group.samples):
        require_exact_routes(sample, form.store())
    writers = {part.file for group in groups for sample in group.samples for part in sample.routes}
    assert len(writers) >= 3, "routes came through fewer processes than there were"


def test_without_workers_the_controller_keeps_them_itself(tmp_path: Path) -> None:
    form = format_in(tmp_path / "routes")

    async def run() -> list[Group]:
        groups = [start(i, 2) for i in range(3)]
        options: dict[str, Any] = {"vocab_size": VOCABULARY, "limits": LIMITS, "routes": form}
        async with served(CodedServer()) as url, connect([url], **options) as client:
            await generate_all(client, groups, WANTED)
        return groups

    groups = asyncio.run(run())
    require_whole(groups)
    for sample in (sample for group in groups for sample in group.samples):
        require_exact_routes(sample, form.store())


def test_who_does_not_ask_gets_and_keeps_nothing(tmp_path: Path) -> None:
    form = format_in(tmp_path / "routes")

    async def run() -> Group:
        group = start(0, 2)
        async with engines(CodedExchange([], [RouteStore(tmp_path / "routes", 2, 2, 9)])) as client:
            await client.generate(group.samples, SETTINGS)
        async with served(CodedServer()) as url, connect([url], vocab_size=VOCABULARY, routes=form) as client:
            more = start(1, 2)
            await client.generate(more.samples, SETTINGS)
            group.samples += more.samples
        return group

    assert [sample.routes for sample in asyncio.run(run()).samples] == [[]] * 4
    assert not (tmp_path / "routes").exists()


def test_routes_that_cannot_be_written_end_the_run_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "routes").write_text("no folder")

    async def run() -> None:
        form = format_in(tmp_path / "routes")
        async with served(CodedServer()) as url, connect([url], vocab_size=VOCABULARY, routes=form) as client:
            await client.generate(start(0, 1).samples, WANTED)

    with pytest.raises(client_module.EngineError, match=r"routes of experts cannot be kept: .*routes"):
        asyncio.run(run())
