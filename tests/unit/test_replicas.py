"""The monitor: why a replica does not serve, in words, and when it serves again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from megatron_rl.rollout import replicas as module
from megatron_rl.rollout.connect import connect
from megatron_rl.rollout.fitness import ExpectedModel
from megatron_rl.rollout.protocol import EngineError, SamplingSettings
from megatron_rl.rollout.replicas import Replicas
from megatron_rl.rollout.sample import Group, Sample
from megatron_rl.rollout.session import open_session
from tests.unit.fake_sglang import FakeEngine

MODEL = ExpectedModel(vocab_size=64, hidden_size=32)


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.02)


@asynccontextmanager
async def watched(*urls: str, **settings: Any) -> AsyncIterator[Replicas]:
    async with open_session() as session:
        replicas = Replicas(urls, session, **settings)
        loop = asyncio.create_task(replicas.run())
        try:
            yield replicas
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def reason_of(control: dict[str, tuple[int, Any]], published: bool = False, **settings: Any) -> str:
    """Why an engine that answers so does not serve; `published`: it is said to hold new weights before it is seen."""

    async def run() -> str:
        async with FakeEngine(control=control) as engine, watched(engine.url, **settings) as replicas:
            if published:
                replicas.publish(0, [engine.url])
                await until(lambda: replicas.states[engine.url])
                replicas.publish(0, [engine.url])
            await until(lambda: replicas.states[engine.url] != "not looked at yet")
            return replicas.states[engine.url]

    return asyncio.run(run())


def test_an_engine_with_the_runs_model_serves():
    assert reason_of({"/model_info": (200, {"vocab_size": 64, "hidden_size": 32})}, expected=MODEL) == ""


@pytest.mark.parametrize(("name", "found", "wanted"), [("vocab_size", 65, 64), ("hidden_size", 16, 32)])
def test_an_engine_that_serves_another_model_is_out_whether_it_or_its_directory_says_so(name, found, wanted, tmp_path):
    facts = {"vocab_size": 64, "hidden_size": 32, name: found}
    said = reason_of({"/model_info": (200, facts)}, expected=MODEL)
    (tmp_path / "config.json").write_text(json.dumps(facts))
    read = reason_of({"/model_info": (200, {"model_path": str(tmp_path)})}, expected=MODEL)
    at_once = reason_of({"/model_info": (200, facts)}, expected=MODEL, published=True)
    for reason in (said, read, at_once):
        assert f"serves another model: {name}={found}" in reason
        assert f"the run's model.path has {wanted}; start it with the run's model" in reason


def test_an_engine_that_cannot_report_routed_experts_is_out_when_they_are_asked_for():
    wanted = ExpectedModel(64, 32, routed_experts=True)
    reason = reason_of({"/server_info": (200, {"enable_return_routed_experts": False})}, expected=wanted)
    assert "engine.routed_experts=true asks for them; start it with --enable-return-routed-experts" in reason
    assert reason_of({"/server_info": (200, {"enable_return_routed_experts": True})}, expected=wanted) == ""


MISFITS: list[dict[str, tuple[int, Any]]] = [
    {"/server_info": (200, {"enable_return_routed_experts": False})},
    {"/model_info": (200, {"vocab_size": 65})},
    {"/model_info": (403, {"error": "wrong key"})},
]


def outcome_of_generate(*controls: dict[str, tuple[int, Any]], later: dict[str, tuple[int, Any]] | None = None) -> str:
    """What a request for engines that answer so ends with; `later`: the first does once all were looked at."""

    async def run() -> str:
        wanted = ExpectedModel(64, 32, routed_experts=True)
        said = [dict(control) for control in controls]
        engines = [FakeEngine(control=control) for control in said]
        async with AsyncExitStack() as stack:
            urls = [(await stack.enter_async_context(engine)).url for engine in engines]
            client = await stack.enter_async_context(
                connect(urls, vocab_size=10, expected=wanted, restarted=later is not None)
            )
            sample = Group.start(0, "p", np.array([1]), 1, run_seed=0, version=0, temperature=1.0).samples[0]
            request = client.generate([sample], SamplingSettings(temperature=1.0, max_new_tokens=4))
            async with asyncio.timeout(30):
                task = asyncio.ensure_future(request)
                if later is not None:
                    await until(lambda: "not looked at yet" not in client.replicas.states.values())
                    said[0].clear()
                    said[0].update(later)
                try:
                    await task
                except EngineError as error:
                    return str(error)
        return "answered"

    return asyncio.run(run())


@pytest.mark.parametrize("control", MISFITS)
def test_a_request_ends_at_once_when_every_engine_would_have_to_be_started_otherwise(control):
    message = outcome_of_generate(control, control)
    assert message.startswith("none of the engines of engine.urls can serve this run: http://")
    assert message.count("start it") == 2


@pytest.mark.parametrize("control", MISFITS)
def test_a_request_waits_for_one_that_fits_and_for_those_that_the_run_starts_again(control):
    fits: dict[str, tuple[int, Any]] = {"/server_info": (200, {"enable_return_routed_experts": True})}
    assert outcome_of_generate(control, fits) == "answered"
    assert outcome_of_generate(control, later=fits) == "answered"


@pytest.mark.parametrize(
    ("control", "complaint"),
    [
        ({"/ready": (503, {"error": {"message": "loading"}})}, "/ready says HTTP 503 loading"),
        (
            {"/model_info": (401, {"error": "no key"})},
            "/model_info says HTTP 401: no key; start it and the run with one engine.api_key_file",
        ),
        ({"/model_info": (200, [])}, "/model_info is not answered with a JSON object; is this an engine?"),
    ],
)
def test_what_is_no_working_engine_is_out_with_what_it_says(control, complaint):
    assert reason_of(control) == complaint


def test_an_engine_that_cannot_be_reached_is_out_and_serves_when_it_can_be():
    async def run() -> str:
        async with FakeEngine() as engine:
            port = engine.url
        async with watched(port) as replicas:
            await until(lambda: replicas.states[port] != "not looked at yet")
            return replicas.states[port]

    assert "ClientConnector" in asyncio.run(run())


def test_after_an_update_those_that_hold_it_serve_and_others_when_they_were_given_it():
    """Label and checksum of one that was left out say nothing: it may be paused in the update that it failed."""
    control: dict[str, tuple[int, Any]] = {"/model_info": (200, {"weight_version": "3"})}

    async def run() -> None:
        async with FakeEngine() as first, FakeEngine(control=control) as late:
            async with watched(first.url, late.url) as replicas:
                await until(lambda: len(replicas.serving) == 2)
                taken: list[tuple[str, str]] = []
                replicas.on_out = lambda url, reason: taken.append((url, reason))
                replicas.publish(3, [first.url])
                assert taken == [(late.url, "was not updated to weight version 3")]
                assert replicas.serving == [first.url]
                await until(lambda: replicas.needs_weights == [late.url])
                looks = late.paths().count("/model_info")
                await until(lambda: late.paths().count("/model_info") > looks + 1)
                assert replicas.needs_weights == [late.url]
                replicas.publish(3, [late.url], repaired=True)
                assert sorted(replicas.serving) == sorted([first.url, late.url])
                assert replicas.needs_weights == []

    asyncio.run(run())


def test_an_engine_that_was_restarted_is_believed_when_label_and_checksum_are_the_published(tmp_path: Path):
    (tmp_path / "current.json").write_text(json.dumps({"version": 3, "path": "x", "checksum": "of the file"}))
    control: dict[str, tuple[int, Any]] = {"/model_info": (200, {"weight_version": "3"})}

    async def run() -> list[str]:
        seen = []
        async with FakeEngine() as old:
            url, port = old.url, int(old.url.rsplit(":", 1)[1])
        async with watched(url, weights_dir=tmp_path) as replicas:

            async def restart(checksum: str, label: str = "3") -> None:
                control["/model_info"] = (200, {"weight_version": label})
                control["/weights_checker"] = (200, {"per_engine_checksum": checksum})
                await until(lambda: "refused" in replicas.states[url] or "ClientConnector" in replicas.states[url])
                async with FakeEngine(control=control, port=port):
                    await until(lambda: replicas.serving or replicas.needs_weights)
                    seen.append(replicas.states[url])

            replicas.publish(3, [], checksum="told")
            await restart("told", label="2")
            await restart("of the file")
            await restart("told")
            replicas.publish(3, [])
            await restart("of the file")
        return seen

    label, checksum, *good = asyncio.run(run())
    assert label == "holds weight version '2', but 3 is published"
    assert checksum == "holds other weights than the published version 3: wrong checksum"
    assert good == ["", ""]


def test_what_was_found_out_before_an_update_brings_no_replica_back_after_it():
    control: dict[str, tuple[int, Any]] = {
        "/model_info": (200, {"weight_version": "3"}),
        "/weights_checker": (200, {"per_engine_checksum": "good"}),
    }

    async def run() -> str:
        engine = FakeEngine(control=control)
        held = engine.held["/weights_checker"] = asyncio.Event()
        async with engine, watched(engine.url) as replicas:
            replicas.publish(3, None, checksum="good")
            await until(lambda: "/weights_checker" in engine.paths())
            replicas.publish(4, [])
            held.set()
            await until(lambda: replicas.needs_weights)
            return replicas.states[engine.url]

    assert asyncio.run(run()) == "was not updated to weight version 4"


def test_what_was_found_out_before_an_update_takes_no_replica_out_after_it():
    control: dict[str, tuple[int, Any]] = {"/model_info": (200, {"weight_version": "3"})}

    async def run() -> list[str]:
        taken: list[str] = []
        engine = FakeEngine(control=control)
        held = engine.held["/model_info"] = asyncio.Event()
        async with engine, watched(engine.url) as replicas:
            replicas.on_out = lambda url, reason: taken.append(reason)
            replicas.publish(3, [engine.url])
            await until(lambda: "/model_info" in engine.paths())
            control["/model_info"] = (200, {"weight_version": "4"})
            replicas.publish(4, [engine.url])
            held.set()
            await until(lambda: "/v1/loads" in engine.paths())  # verified
            assert replicas.serving == [engine.url]
        return taken

    assert asyncio.run(run()) == []


@pytest.mark.parametrize("serves", [True, False])
def test_a_replica_that_is_ahead_of_what_was_published_is_left_as_it_is(serves):
    """Its update is on its way, and the trainer will say whether it went well."""
    control: dict[str, tuple[int, Any]] = {"/model_info": (200, {"weight_version": "4"})}

    async def run() -> str:
        async with FakeEngine(control=control) as engine, watched(engine.url) as replicas:
            replicas.publish(3, [engine.url] if serves else None)
            await until(lambda: engine.paths().count("/model_info") > 1)
            assert replicas.needs_weights == []
            return replicas.states[engine.url]

    ahead = "holds weight version '4', and 3 is published; it is being updated"
    assert asyncio.run(run()) == ("" if serves else ahead)


def test_a_repair_puts_back_nothing_that_is_out_for_its_connection():
    async def run() -> Mapping[str, str]:
        async with open_session() as session:
            replicas = Replicas(["http://a", "http://b"], session)
            replicas.publish(4, ["http://a", "http://b"])
            replicas.failed("http://a", "connection refused")
            replicas.publish(4, ["http://a"], repaired=True)
            return replicas.states

    assert asyncio.run(run()) == {"http://a": "connection refused", "http://b": ""}


def test_a_replica_that_answers_nonsense_is_out_and_the_others_are_watched_on(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    control = {"/model_info": (200, {"model_path": str(tmp_path)})}

    async def run() -> str:
        async with FakeEngine(control=control) as strange, FakeEngine() as good:
            async with watched(strange.url, good.url, expected=MODEL) as replicas:
                await until(lambda: replicas.serving == [good.url])
                await until(lambda: good.paths().count("/ready") > 1)
                return replicas.states[strange.url]

    assert asyncio.run(run()).startswith("cannot be judged: TypeError(")


def test_a_replica_that_hangs_while_it_is_verified_holds_up_no_other():
    async def run() -> str:
        hanging, good = FakeEngine(control={"/model_info": (200, {"weight_version": "3"})}), FakeEngine()
        hanging.held["/model_info"] = asyncio.Event()
        async with hanging, good, watched(hanging.url, good.url) as replicas:
            await until(lambda: "/model_info" in hanging.paths() and good.url in replicas.serving)
            replicas.failed(good.url, "connection reset")
            await until(lambda: good.url in replicas.serving)
            hanging.held["/model_info"].set()
            return replicas.states[hanging.url]

    assert asyncio.run(run()) == "not looked at yet"


def test_a_monitor_that_fails_all_the_same_ends_what_depends_on_it():
    control: dict[str, tuple[int, Any]] = {}

    async def run() -> None:
        async with FakeEngine(control=control) as engine, connect([engine.url], vocab_size=10) as client:
            await until(lambda: client.replicas.serving)
            client.replicas.on_out = lambda url, reason: 1 / 0
            control["/ready"] = (503, {})
            await asyncio.sleep(30)

    with pytest.raises(EngineError, match="the monitor of the engines has failed") as caught:
        asyncio.run(run())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_replica_that_answers_nothing_any_more_is_out_and_its_requests_are_told(monkeypatch):
    monkeypatch.setattr(module, "PROBE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(module, "SILENT_S", 0.2)

    async def run() -> list[tuple[str, str]]:
        taken: list[tuple[str, str]] = []
        silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(60), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        async with watched(url) as replicas:
            replicas.on_out = lambda url, reason: taken.append((url, reason))
            replicas.publish(0, [url])
            await until(lambda: taken)
        silent.close()
        return taken

    ((_, reason),) = asyncio.run(run())
    assert "silent for" in reason
    assert "/ready does not answer" in reason


def test_a_request_at_a_replica_that_falls_silent_moves_to_another_one(monkeypatch):
    monkeypatch.setattr(module, "PROBE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(module, "SILENT_S", 0.2)

    async def run() -> tuple[list[Sample], FakeEngine, str]:
        silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(60), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        async with FakeEngine() as engine, connect([url, engine.url], vocab_size=10) as client:
            client.replicas.publish(0, [url, engine.url])
            samples = Group.start(0, "p", np.array([1]), 2, run_seed=0, version=0, temperature=1.0).samples
            async with asyncio.timeout(30):
                await client.generate(samples, SamplingSettings(temperature=1.0, max_new_tokens=4))
            silent.close()
            return samples, engine, client.replicas.states[url]

    samples, engine, reason = asyncio.run(run())
    assert "silent for" in reason
    assert [s.response_tokens.tolist() for s in samples] == [[5, 2], [5, 2]]
    (body,) = [body for path, body in engine.requests if path == "/generate"]
    assert body["rid"] == ["s000000000-000.0001", "s000000000-001.0001"]


def test_the_first_reason_stays_while_failures_follow_from_it():
    async def run() -> str:
        async with open_session() as session:
            replicas = Replicas(["http://a"], session)
            replicas.publish(0, ["http://a"])
            replicas.failed("http://a", "connection refused")
            replicas.failed("http://a", "given up")
            return replicas.states["http://a"]

    assert asyncio.run(run()) == "connection refused"


def test_the_fewest_that_served_and_the_outages_are_counted_from_one_question_to_the_next():
    replicas = Replicas(["http://a", "http://b"], cast(Any, None), clock=lambda: 0.0)
    replicas.publish(0, ["http://a", "http://b"])
    assert replicas.tally() == (2, 0)
    replicas.failed("http://a", "gone")
    replicas.failed("http://a", "gone, as is known")
    replicas.publish(1, ["http://a", "http://b"])
    assert replicas.tally() == (1, 1)
    assert replicas.tally() == (2, 0)
