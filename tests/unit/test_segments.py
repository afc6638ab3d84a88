"""Responses in segments: whatever comes between, each sample gets exactly the tokens that its spans say."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rollout import client as client_module
from megatron_rl.rollout import flights
from megatron_rl.rollout.client import EngineClient, Limits
from megatron_rl.rollout.protocol import EngineError, SamplingSettings
from megatron_rl.rollout.replicas import Replicas
from megatron_rl.rollout.sample import Group, group_name
from megatron_rl.rollout.wire import decode, encode, pack_groups, unpack_groups
from tests.unit.coded_engine import LONGEST, SETTINGS, VOCABULARY, CodedExchange, length_of, require_exact, start

URL = "http://engine"
ACTIONS = ["whole", "update", "refused", "lost", "worker", "aborted", "held"]


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LOST_PAUSE_S", 0.0)


def engines(exchange: CodedExchange, **limits: Any) -> EngineClient:
    replicas = Replicas([URL], cast(Any, None))
    replicas.publish(0, [URL])
    return EngineClient(exchange, replicas, vocab_size=VOCABULARY, limits=Limits(**{"retries": 1000, **limits}))


async def suspended_when_held(
    client: EngineClient, exchange: CodedExchange, group: Group, wanted: SamplingSettings = SETTINGS
) -> None:
    """Generate; whenever a request hangs, suspend the group."""
    exchange.held.clear()
    task = asyncio.ensure_future(client.generate(group.samples, wanted))
    held = asyncio.ensure_future(exchange.held.wait())
    await asyncio.wait({task, held}, return_when=asyncio.FIRST_COMPLETED)
    if held.done():
        client.suspend([group_name(group.id)])
    held.cancel()
    await asyncio.wait_for(task, 20)


async def put_back(client: EngineClient, exchange: CodedExchange) -> None:
    """What the monitor does, at once."""
    while True:
        if not client.replicas.serving:
            client.replicas.publish(exchange.version, [URL])
        await asyncio.sleep(0)


def through_a_checkpoint(group: Group) -> Group:
    arrays, values = pack_groups([group])
    back = decode(encode(arrays, {"groups": values}))
    return unpack_groups(back[0], back[1]["groups"])[0]


@settings(max_examples=200, deadline=None)
@given(
    script=st.lists(st.sampled_from(ACTIONS), max_size=40),
    size=st.integers(1, 5),
    segment=st.integers(1, 50),
    first=st.integers(0, 30),
    checkpoints=st.booleans(),
)
def test_no_token_is_lost_or_doubled_whatever_comes_between_segments(script, size, segment, first, checkpoints):
    async def run() -> None:
        exchange = CodedExchange(script)
        group = start(first, size)
        async with engines(exchange, segment_tokens=segment) as client:
            monitor = asyncio.create_task(put_back(client, exchange))
            while group.unfinished:
                await suspended_when_held(client, exchange, group)
                for sample in group.samples:
                    require_exact(sample)
                if checkpoints:
                    group = through_a_checkpoint(group)
            monitor.cancel()
        assert len(exchange.rids) == len(set(exchange.rids)), "two requests had one name"

    asyncio.run(run())


def test_a_group_begins_together_and_its_samples_go_on_by_themselves():
    async def run() -> tuple[Group, list[str]]:
        exchange = CodedExchange([])
        group = start(1, 3)
        async with engines(exchange, segment_tokens=16) as client:
            await client.generate(group.samples, SETTINGS)
        return group, exchange.rids

    group, rids = asyncio.run(run())
    lengths = [min(length_of(8 + k), LONGEST) for k in range(3)]
    assert [s.response_length for s in group.samples] == lengths
    for k, length in enumerate(lengths):
        assert sorted(r for r in rids if f"-00{k}." in r) == [
            f"s000000001-00{k}.{i:04d}" for i in range(-(-length // 16))
        ]


def test_each_sample_may_have_a_limit_of_its_own_and_none_is_asked_beyond_the_context():
    async def run() -> Group:
        group = start(0, 4)  # 3, 16, 29, 42 tokens
        each = [SamplingSettings(1.0, limit) for limit in (40, 7, 40, 40)]
        async with engines(CodedExchange([]), context_length=23, segment_tokens=8) as client:
            await client.generate(group.samples, each)
        return group

    group = asyncio.run(run())
    assert [s.response_length for s in group.samples] == [3, 7, 20, 20]
    assert [s.finish_reason for s in group.samples] == ["stop", "length", "length", "length"]


def test_an_abort_that_was_lost_is_sent_again(monkeypatch):
    monkeypatch.setattr(flights, "RESEND_ABORT_S", 0.01)

    class Deaf(CodedExchange):
        aborts = 0

        async def abort(self, url: str, rids: Any) -> None:
            self.aborts += 1
            if self.aborts == 3:
                await super().abort(url, rids)

    async def run() -> tuple[Group, int]:
        exchange = Deaf(["whole", "held"])
        group = start(0, 3)
        async with engines(exchange, segment_tokens=4) as client:
            await suspended_when_held(client, exchange, group)
        return group, exchange.aborts

    group, aborts = asyncio.run(run())
    assert aborts == 3
    assert group.unfinished


def test_an_engine_that_never_answers_an_abort_is_given_up_with_its_segment(monkeypatch):
    monkeypatch.setattr(flights, "RESEND_ABORT_S", 0.01)
    monkeypatch.setattr(flights, "ABORT_DEADLINE_S", 0.05)

    class Dead(CodedExchange):
        async def abort(self, url: str, rids: Any) -> None:
            pass

    async def run() -> tuple[Group, str]:
        exchange = Dead(["whole", "held"])
        group = start(0, 2)
        async with engines(exchange, segment_tokens=4) as client:
            await suspended_when_held(client, exchange, group)
            return group, client.replicas.states[URL]

    group, reason = asyncio.run(run())
    assert [s.response_length for s in group.samples] == [3, 4]
    assert "no answer within 0.05 s to an abort" in reason


def test_what_waits_for_room_or_for_a_replica_is_suspended_at_once_and_costs_nothing():
    async def run() -> tuple[list[Group], list[str]]:
        exchange = CodedExchange(["held"])
        groups = [start(i, 2) for i in range(3)]
        async with engines(exchange) as client:
            client._gate = client_module.Gate(2)
            tasks = [asyncio.create_task(client.generate(g.samples, SETTINGS)) for g in groups[:2]]
            await exchange.held.wait()
            client.suspend([group_name(1)])  # at the gate
            await asyncio.wait_for(tasks[1], 5)
            client.suspend([group_name(0)])
            await asyncio.wait_for(tasks[0], 5)
            client.replicas.failed(URL, "gone")
            task = asyncio.create_task(client.generate(groups[2].samples, SETTINGS))
            await asyncio.sleep(0)
            client.suspend([group_name(2)])
            await asyncio.wait_for(task, 5)
        return groups, exchange.rids

    groups, rids = asyncio.run(run())
    assert [s.response_length for g in groups[1:] for s in g.samples] == [0] * 4
    assert {rid[:11] for rid in rids} == {"s000000000-"}


def test_when_no_replica_serves_the_message_names_each_with_its_reason():
    async def run() -> None:
        async with engines(CodedExchange([]), request_timeout_s=0.05) as client:
            client.replicas.failed(URL, "connection refused")
            await client.generate(start(0, 1).samples, SETTINGS)

    with pytest.raises(EngineError, match=r"no engine has served for 0.05 s .*http://engine: connection refused"):
        asyncio.run(run())
