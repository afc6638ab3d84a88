"""A replica that fails at requests which another one can answer, or has no room: who is asked next, and when nobody."""

from __future__ import annotations

import asyncio

import pytest

from megatron_rl.rollout import client as client_module
from megatron_rl.rollout import replicas as replicas_module
from megatron_rl.rollout.protocol import EngineBusy, EngineError, ProtocolError, ReplicaError
from megatron_rl.rollout.sample import Sample, group_name
from tests.unit.fake_sglang import META, Answer, FakeEngine, changed, put, says
from tests.unit.test_client import SETTINGS, asked, client_of, group

BROKEN = says(500, {"error": {"message": "CUDA error: an illegal memory access"}})
UNREADABLE = changed(put([[-1, 5, None], [None, 2, None]], META, "output_token_logprobs"))


def outcome_of(
    first: list[Answer], second: list[Answer], **limits: object
) -> tuple[list[Sample] | BaseException, list[FakeEngine], dict[str, str]]:
    """Samples, or the exception, of a group that the first of two engines is asked for; the engines; who is out."""

    async def run() -> tuple[list[Sample] | BaseException, list[FakeEngine], dict[str, str]]:
        engines = [FakeEngine(*first), FakeEngine(*second)]
        async with engines[0], engines[1], client_of(*engines, **limits) as client:
            client.replicas.publish(0, [engine.url for engine in engines])
            samples = group()
            error = (await asyncio.gather(client.generate(samples, SETTINGS), return_exceptions=True))[0]
            return error or samples, engines, dict(client.replicas.states)

    return asyncio.run(run())


@pytest.mark.parametrize(("answer", "said"), [(BROKEN, "illegal memory access"), (UNREADABLE, "is nan at token 1")])
def test_what_one_replica_cannot_answer_another_one_is_asked_and_the_first_is_out_with_its_reason(answer, said):
    samples, (bad, good), states = outcome_of([answer], [])
    assert [s.response_tokens.tolist() for s in samples] == [[5, 2], [5, 2]]
    assert (asked(bad).count("/generate"), asked(good).count("/generate")) == (1, 1)
    assert said in states[bad.url]
    assert states[good.url] == ""


@pytest.mark.parametrize(("answer", "kind"), [(BROKEN, ReplicaError), (UNREADABLE, ProtocolError)])
def test_a_request_at_which_two_replicas_fail_alike_ends_the_run_with_what_both_say(answer, kind):
    error, engines, _ = outcome_of([answer], [answer], retries=9)
    assert type(error) is kind
    assert all(engine.url in str(error) for engine in engines)
    assert [asked(engine).count("/generate") for engine in engines] == [1, 1]


def test_two_replicas_that_fail_differently_use_up_the_retries():
    error, engines, _ = outcome_of([BROKEN], [UNREADABLE], retries=1)
    assert "is nan at token 1" in str(error)
    assert [asked(engine).count("/generate") for engine in engines] == [1, 1]


def test_a_request_that_is_refused_for_itself_is_asked_of_no_other_replica():
    error, engines, states = outcome_of([says(400, {"error": {"message": "input is too long"}})], [])
    assert type(error) is EngineError
    assert "input is too long" in str(error)
    assert sum(asked(engine).count("/generate") for engine in engines) == 1
    assert not any(states.values()), "an engine is out for a bad request"


@pytest.mark.parametrize("status", [429, 503])
def test_a_replica_without_room_goes_on_serving_and_another_one_is_asked(status, monkeypatch):
    monkeypatch.setattr(client_module, "BUSY_PAUSES_S", (0.01, 0.02))
    samples, engines, states = outcome_of([says(status)] * 3, [], retries=0)
    assert [s.response_tokens.tolist() for s in samples] == [[5, 2], [5, 2]]
    assert [asked(engine).count("/generate") for engine in engines] == [1, 1]
    assert not any(states.values())


def test_when_no_replica_has_room_it_is_asked_again_whatever_the_retries_until_the_deadline(monkeypatch):
    monkeypatch.setattr(client_module, "BUSY_PAUSES_S", (0.01, 0.02))
    full = says(503, {"error": {"message": "The request queue is full."}})
    samples, _, _ = outcome_of([full] * 4, [full] * 4, retries=0)
    assert samples[0].response_tokens.tolist() == [5, 2]
    error, _, _ = outcome_of([full] * 999, [full] * 999, retries=0, request_timeout_s=0.2)
    assert type(error) is EngineBusy
    assert "The request queue is full" in str(error)
    assert "no engine had room for 0.2 s (rollout.request_timeout_s)" in str(error)


def test_a_pause_for_room_ends_when_the_group_is_suspended(monkeypatch):
    monkeypatch.setattr(client_module, "BUSY_PAUSES_S", (1000.0, 1000.0))

    async def run() -> list[Sample]:
        engine = FakeEngine(says(503))
        async with engine, client_of(engine) as client:
            samples = group()
            task = asyncio.create_task(client.generate(samples, SETTINGS))
            while not client.transport_errors:
                await asyncio.sleep(0.01)
            client.suspend([group_name(0)])
            await asyncio.wait_for(task, 30)
            return samples

    assert not any(sample.finished for sample in asyncio.run(run()))


def test_a_replica_that_failed_rests_whatever_it_says_of_itself_but_not_a_new_process(monkeypatch):
    monkeypatch.setattr(replicas_module, "POLL_S", 0.02)
    now = [0.0]

    async def until(condition: object) -> None:
        async with asyncio.timeout(30):
            while not condition():  # type: ignore[operator]
                await asyncio.sleep(0.01)

    async def run() -> None:
        good, bad = FakeEngine(), FakeEngine(BROKEN, BROKEN)
        async with good, bad, client_of(bad, good) as client:
            replicas = client.replicas
            monkeypatch.setattr(replicas, "_clock", lambda: now[0])
            replicas.publish(0, [good.url, bad.url])
            await client.generate(group(), SETTINGS)
            looks = bad.paths().count("/model_info")
            replicas.publish(0, [good.url, bad.url])
            await until(lambda: bad.paths().count("/model_info") > looks)
            asked = bad.paths().count("/ready")
            await until(lambda: bad.paths().count("/ready") > asked + 1)  # what was seen of it has been judged
            assert replicas.serving == [good.url]
            now[0] = replicas_module.REST_S + 1
            await until(lambda: len(replicas.serving) == 2)
            replicas.failed(bad.url, "again", rests=True)
            port = int(bad.url.rsplit(":", 1)[1])
            await bad._runner.cleanup()
            await until(lambda: "ClientConnectorError" in replicas.states[bad.url])
            async with FakeEngine(port=port):
                await until(lambda: len(replicas.serving) == 2)

    asyncio.run(run())
