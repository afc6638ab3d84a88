"""The engine client, against answers that a real engine cannot be made to give."""

from __future__ import annotations

import asyncio
import math
import resource
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.rollout.client import EngineClient, Limits
from megatron_rl.rollout.connect import connect
from megatron_rl.rollout.exchange import HttpExchange
from megatron_rl.rollout.protocol import (
    EngineError,
    GenerationAborted,
    Prompt,
    ProtocolError,
    ReplicaError,
    SamplingSettings,
    TransportError,
)
from megatron_rl.rollout.sample import Group, Sample
from megatron_rl.rollout.session import error_text, raise_open_file_limit
from tests.unit.fake_sglang import (
    META,
    Answer,
    Body,
    FakeEngine,
    changed,
    drop,
    good_answer,
    hangs_until,
    put,
    resets,
    says,
    says_text,
)

SETTINGS = SamplingSettings(temperature=1.0, max_new_tokens=4, stop_token_ids=(2,))
VOCABULARY = 10
ABORTS = ["/abort_request"] * 2
"""One for each sequence of `group()`: SGLang knows whole ids only."""


def group(group_id: int = 0, size: int = 2, prompt: Sequence[int] = (1, 2, 3)) -> list[Sample]:
    return Group.start(group_id, "p", np.array(prompt, np.int64), size, run_seed=0, version=0, temperature=1.0).samples


def client_of(*engines: FakeEngine, **settings: Any) -> AbstractAsyncContextManager[EngineClient]:
    limits = Limits(**{name: settings.pop(name) for name in tuple(settings) if name in Limits.__annotations__})
    return connect([e.url for e in engines], vocab_size=VOCABULARY, limits=limits, **settings)


def asked(engine: FakeEngine) -> list[str]:
    """What the client asked; the monitor's looks come at any time."""
    return [path for path in engine.paths() if path in ("/generate", "/abort_request")]


def bodies(engine: FakeEngine) -> list[Body]:
    """Of its requests for generation."""
    return [body for path, body in engine.requests if path == "/generate"]


def generate_from(*answers: Answer, **settings: Any) -> tuple[list[Sample] | BaseException, FakeEngine]:
    """The outcome (samples or the exception) of one group at an engine that gives `answers`."""

    async def run() -> tuple[list[Sample] | BaseException, FakeEngine]:
        async with FakeEngine(*answers) as engine, client_of(engine, **settings) as client:
            samples = group()
            error = (await asyncio.gather(client.generate(samples, SETTINGS), return_exceptions=True))[0]
            return error or samples, engine

    return asyncio.run(run())


def test_a_group_begins_with_one_request_that_has_a_name_and_a_seed_for_each_sample():
    samples, engine = generate_from()
    assert asked(engine) == ["/generate"]
    body = bodies(engine)[0]
    assert body["rid"] == ["s000000000-000.0000", "s000000000-001.0000"]
    assert body["input_ids"] == [[1, 2, 3], [1, 2, 3]]
    assert [p["sampling_seed"] for p in body["sampling_params"]] == [s.seed for s in samples]
    assert body["sampling_params"][0]["max_new_tokens"] == 4
    assert body["sampling_params"][0]["stop_token_ids"] == [2]
    assert body["return_logprob"] is True
    assert samples[0].response_tokens.tolist() == [5, 2]
    assert samples[0].log_probs.dtype == np.float32
    assert samples[1].finish_reason == "stop"


def span(version: str, start: int, end: int) -> Body:
    return {"version": version, "start": start, "end": end}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (drop("output_ids"), "field output_ids is missing"),
        (drop(META), "field meta_info is missing"),
        (drop(META, "finish_reason"), "field meta_info.finish_reason is missing"),
        (drop(META, "finish_reason", "type"), "field meta_info.finish_reason.type is missing"),
        (drop(META, "output_token_logprobs"), "field meta_info.output_token_logprobs is missing"),
        (put([[-1.0, 5, None]], META, "output_token_logprobs"), "output_token_logprobs has 1 entries for 2 tokens"),
        (
            put([[None, 5, None], [-1, 2, None]], META, "output_token_logprobs"),
            "output_token_logprobs is nan at token 0",
        ),
        (put([[-1, 5, None], [-1e999, 2, None]], META, "output_token_logprobs"), "not JSON|is -inf at token 1"),
        (put([[-1, 5, None], [-1, 7, None]], META, "output_token_logprobs"), "names other token ids"),
        (put([[-1], [-1]], META, "output_token_logprobs"), r"must be \[log_prob, token_id, text\]"),
        (put([5, 10], "output_ids"), "holds id 10, outside the vocabulary of 10"),
        (put([5, -1], "output_ids"), "holds id -1, outside the vocabulary"),
        (put([5.5, "x"], "output_ids"), "must be token ids"),
        (put([1] * 5, "output_ids"), "has 5 tokens, but max_new_tokens=4 was asked for"),
        (put([], "output_ids"), "output_ids is empty, but the response ended with 'stop'"),
        (put([{"version": "0", "start": 0, "end": 1}], META, "weight_versions"), "does not cover the 2 tokens"),
        (put([{"version": "blue", "start": 0, "end": 2}], META, "weight_versions"), "weight_versions is not readable"),
        (put([{"version": "1.5", "start": 0, "end": 2}], META, "weight_versions"), "weight_versions is not readable"),
        (put([{"version": "-1", "start": 0, "end": 2}], META, "weight_versions"), "'-1' is no weights version"),
        (put([{"version": 1, "start": 0, "end": 2}], META, "weight_versions"), "1 is no weights version"),
        (put([{"version": "0", "start": 0.0, "end": 2}], META, "weight_versions"), "does not cover the 2 tokens"),
        (put([span("3", 0, 1), span("2", 1, 2)], META, "weight_versions"), "goes back to older weights"),
        (put([[0.5, 5, None], [-1, 2, None]], META, "output_token_logprobs"), "0.5 at token 0 of 2; no probability"),
        (put([["-1", 5, None], [-1, 2, None]], META, "output_token_logprobs"), "with a number first"),
        (put([[True, 5, None], [-1, 2, None]], META, "output_token_logprobs"), "with a number first"),
        (put([7.9, 2], "output_ids"), "must be token ids in a flat list; it holds 7.9"),
        (put([5, True], "output_ids"), "it holds True"),
        (put([5, [2]], "output_ids"), r"it holds \[2\]"),
        (put([5, 2**70], "output_ids"), "must be token ids"),
        (put("gave up", META, "finish_reason", "type"), "is 'gave up'; stop, length, abort are known"),
        (put("s000000000-001.0007", META, "id"), "id is 's000000000-001.0007': the answer to another request"),
    ],
)
def test_an_answer_that_is_not_whole_is_refused_by_engine_and_field(change, complaint):
    outcome, engine = generate_from(changed(change))
    assert isinstance(outcome, ProtocolError)
    assert engine.url in str(outcome)
    with pytest.raises(ProtocolError, match=complaint):
        raise outcome
    assert asked(engine) == ["/generate"]


def test_a_log_prob_that_rounding_put_above_zero_is_taken_as_it_is():
    samples, _ = generate_from(changed(put([[1e-6, 5, None], [-1, 2, None]], META, "output_token_logprobs")))
    assert samples[1].log_probs.tolist() == pytest.approx([1e-6, -1])


@pytest.mark.parametrize("depth", [900, 5_000, 200_000])
def test_json_of_any_depth_is_refused_in_one_message(depth):
    outcome, _ = generate_from(says_text('[{"output_ids": ' + "[" * depth + "]" * depth + "}, {}]"))
    assert isinstance(outcome, ProtocolError)
    assert len(str(outcome)) < 500


def test_nan_written_as_a_bare_word_is_refused_as_not_json():
    outcome, _ = generate_from(says_text('[{"output_ids": [1], "meta_info": {"x": NaN}}]'))
    assert isinstance(outcome, ProtocolError)
    assert "not JSON" in str(outcome)


def test_another_number_of_answers_is_refused():
    outcome, _ = generate_from(says(200, []))
    assert isinstance(outcome, ProtocolError)
    assert "asked for 2 sequences and answered 0" in str(outcome)


def test_an_engine_without_version_spans_counts_its_final_version_for_all_tokens():
    def change(answer: Body) -> None:
        del answer[META]["weight_versions"]
        answer[META]["weight_version"] = "7"

    samples, _ = generate_from(changed(change))
    assert [(s.version, s.start, s.end) for s in samples[1].spans] == [(7, 0, 2)]


def aborted(tokens: list[int], **reason: Any) -> Callable[[Body], None]:
    """What is said of a sequence that was aborted; one that waited has no prompt_tokens and an empty span."""

    def change(answer: Body) -> None:
        whole = good_answer(answer["meta_info"]["id"], tokens)
        answer.update(whole)
        answer[META]["finish_reason"] = {"type": "abort", "message": "Aborted", **reason}
        if not tokens:
            del answer[META]["prompt_tokens"], answer[META]["output_token_logprobs"]

    return change


def test_what_an_engine_aborts_by_itself_is_gone_on_with_under_another_name():
    samples, engine = generate_from(changed(aborted([5])), changed(aborted([])))
    assert [s.response_tokens.tolist() for s in samples] == [[5, 2], [5, 5, 2]]
    assert [b["rid"] for b in bodies(engine)] == [
        ["s000000000-000.0000", "s000000000-001.0000"], ["s000000000-001.0001"], ["s000000000-001.0002"]
    ]  # fmt: skip
    assert bodies(engine)[1]["input_ids"] == bodies(engine)[2]["input_ids"] == [[1, 2, 3, 5]]
    assert bodies(engine)[2]["sampling_params"][0]["max_new_tokens"] == 3


def test_an_engine_that_keeps_aborting_is_an_error_that_says_what_it_said():
    outcome, engine = generate_from(*[changed(aborted([], message="Abort in waiting queue"))] * 3, retries=2)
    assert isinstance(outcome, GenerationAborted)
    assert "s000000000-001." in str(outcome)
    assert "Abort in waiting queue" in str(outcome)
    assert len(bodies(engine)) == 3


def test_a_sequence_that_the_engine_gives_up_with_a_status_is_an_error_at_once():
    outcome, engine = generate_from(changed(aborted([], status_code=400, message="the grammar is broken")))
    assert isinstance(outcome, GenerationAborted)
    assert "status 400: the grammar is broken" in str(outcome)
    assert asked(engine) == ["/generate"]


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [([], "has no prompt tokens"), ([1, VOCABULARY], "token 10, outside"), ([-1, 1], "token -1, outside")],
)
def test_a_prompt_that_would_end_a_real_sglang_is_never_sent(tokens, complaint):
    async def run() -> FakeEngine:
        async with FakeEngine() as engine, client_of(engine) as client:
            with pytest.raises(EngineError, match=rf"s000000007-000\. .*{complaint}"):
                await client.generate([*group(), *group(7, 1, tokens)], SETTINGS)
            return engine

    assert asked(asyncio.run(run())) == []


@pytest.mark.parametrize("failure", [says(503), says(429), says(502), resets()])
def test_after_a_transport_error_the_segment_is_asked_for_again_and_what_may_still_run_is_aborted(failure):
    samples, engine = generate_from(failure)
    assert [s.response_tokens.tolist() for s in samples] == [[5, 2], [5, 2]]
    assert [b["rid"][0] for b in bodies(engine)] == ["s000000000-000.0000", "s000000000-000.0001"]
    aborts = [body["rid"] for path, body in engine.requests if path == "/abort_request"]
    assert sorted(aborts) == ["s000000000-000.0000", "s000000000-001.0000"]


def test_what_is_no_http_is_a_transport_error_that_names_the_address():
    async def gibberish(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org ESMTP\r\n")
        writer.close()

    async def run() -> tuple[str, BaseException]:
        server = await asyncio.start_server(gibberish, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, HttpExchange(VOCABULARY) as exchange:
            prompts = [Prompt("r", np.array([1]), 0, 1, SETTINGS)]
            return url, (await asyncio.gather(exchange.generate(url, prompts), return_exceptions=True))[0]

    url, error = asyncio.run(run())
    assert isinstance(error, TransportError)
    assert f"engine {url}: /generate: " in str(error)
    assert "is it running?" in str(error)


def test_retries_end_and_the_last_error_names_the_engine():
    outcome, engine = generate_from(says(502, {"error": {"message": "warming up"}}), says(502), retries=1)
    assert isinstance(outcome, TransportError)
    assert f"engine {engine.url}: /generate refused with HTTP 502" in str(outcome)
    assert asked(engine).count("/generate") == 2


def test_a_name_that_the_engine_still_knows_from_an_earlier_process_is_given_up_for_another():
    samples, engine = generate_from(says(400, {"error": {"message": "Duplicate request ID detected: s000"}}))
    assert samples[0].response_tokens.tolist() == [5, 2]
    assert [b["rid"][1] for b in bodies(engine)] == ["s000000000-001.0000", "s000000000-001.0001"]


@pytest.mark.parametrize("status", [400, 404, 422, 500])
def test_a_refusal_of_the_only_engine_is_never_sent_again_and_its_message_is_carried(status):
    outcome, engine = generate_from(says(status, {"error": {"message": "temperature must be a non-negative number"}}))
    assert type(outcome) is (ReplicaError if status == 500 else EngineError)
    assert "temperature must be a non-negative number" in str(outcome)
    assert f"HTTP {status}" in str(outcome)
    assert [path for path in asked(engine) if path not in ABORTS] == ["/generate"]


def test_a_request_that_gets_no_answer_ends_at_its_deadline_and_is_aborted():
    async def run() -> tuple[Any, FakeEngine]:
        engine = FakeEngine()
        engine.always = engine.hang()
        async with (
            engine,
            client_of(engine, request_timeout_s=0.2, logs={engine.url: Path("RUN/engine-0.log")}) as client,
        ):
            outcome = await asyncio.gather(client.generate(group(), SETTINGS), return_exceptions=True)
            return outcome[0], engine

    outcome, engine = asyncio.run(run())
    assert isinstance(outcome, EngineError)
    assert "no answer within 0.2 s (rollout.request_timeout_s); look at RUN/engine-0.log" in str(outcome)
    assert engine.url in str(outcome)
    assert asked(engine) == ["/generate", *ABORTS]


def test_the_only_engine_that_serves_may_be_late_once_while_others_are_out():
    """Its segment is asked for again, there or elsewhere, as often as retries say."""

    async def run() -> tuple[list[Sample], FakeEngine]:
        late = asyncio.Event()
        engine, out = FakeEngine(hangs_until(late)), FakeEngine(control={"/ready": (503, {})})
        async with engine, out, client_of(engine, out, request_timeout_s=0.5, retries=1) as client:
            client.replicas.publish(0, [engine.url])
            samples = group()
            await client.generate(samples, SETTINGS)
            late.set()
            return samples, engine

    samples, engine = asyncio.run(run())
    assert [s.response_tokens.tolist() for s in samples] == [[5, 2], [5, 2]]
    assert asked(engine).count("/generate") == 2


def test_a_cancelled_request_is_aborted_at_the_engine():
    async def run() -> FakeEngine:
        engine = FakeEngine()
        engine.always = engine.hang()
        async with engine, client_of(engine) as client:
            task = asyncio.create_task(client.generate(group(), SETTINGS))
            while not asked(engine):
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return engine

    assert asked(asyncio.run(run())) == ["/generate", *ABORTS]


def test_a_group_whose_engine_is_gone_moves_to_another_replica():
    async def run() -> FakeEngine:
        async with FakeEngine() as gone:
            pass
        async with FakeEngine() as engine, client_of(gone, engine) as client:
            for number in range(4):
                await client.generate(group(number), SETTINGS)
            return engine

    assert asked(asyncio.run(run())).count("/generate") == 4


def test_load_is_spread_over_replicas_and_bounded():
    """Eight groups at once on two engines, with room for four: never more than four in flight, two on each."""

    async def run() -> tuple[list[int], int]:
        running = [0, 0]
        most = 0

        def slow(which: int) -> Answer:
            async def answer(body: Body) -> Any:
                nonlocal most
                running[which] += len(body["rid"])
                most = max(most, sum(running))
                await asyncio.sleep(0.05)
                running[which] -= len(body["rid"])
                return await changed(lambda _: None)(body)

            return answer

        first = FakeEngine(*[slow(0)] * 8)
        second = FakeEngine(*[slow(1)] * 8)
        async with first, second, client_of(first, second, concurrency=4) as client:
            tasks = [client.generate(group(n, size=1), SETTINGS) for n in range(8)]
            await asyncio.gather(*tasks, return_exceptions=True)
        return [len(bodies(first)), len(bodies(second))], most

    spread, most = asyncio.run(run())
    assert spread == [4, 4]
    assert most == 4


def test_the_limit_of_open_files_is_lifted():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        raise_open_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(65536, hard if hard > 0 else math.inf)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_request_is_sent_again_until_the_patience_ends_however_few_retries_are_left():
    samples, engine = generate_from(*[says(502)] * 4, retries=1, patience_s=60.0)
    assert [s.response_tokens.tolist() for s in samples] == [[5, 2], [5, 2]]
    assert asked(engine).count("/generate") == 5


def test_a_page_of_a_web_server_becomes_one_line_without_tags():
    page = b"<html>\n <head><title>Error</title></head>\n <body><h1>Error response</h1>\n<p>code: 501</p></body></html>"
    assert error_text(page) == "Error Error response code: 501"
