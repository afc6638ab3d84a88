"""The trainer's side of the controller: deadlines and plain errors, with a controller whose engine misbehaves."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import orjson
import pytest

from megatron_rl.rollout.endpoint import Endpoint, controller_file, engine_logs, engine_urls, publish, read
from megatron_rl.rollout.pull import ControllerClient, ControllerError
from megatron_rl.rollout.server import _Routes
from megatron_rl.rollout.wire import RolloutTable
from tests.tiny import tiny_tokenizer
from tests.unit.fake_sglang import FakeEngine, says
from tests.unit.rollout_rig import config, running_controller, write_prompts

VOCABULARY = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer and config.json: all that the controller reads of a model."""
    path = tmp_path_factory.mktemp("model")
    tiny_tokenizer(VOCABULARY).save_pretrained(path)
    facts = {
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_key_value_heads": 1,
    }
    facts |= {"num_attention_heads": 1, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
    (path / "config.json").write_text(json.dumps(facts))
    return path


@contextmanager
def running(engine: FakeEngine) -> Iterator[str]:
    """The fake engine in a loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(engine.__aenter__(), loop).result(10)
        yield engine.url
    finally:
        asyncio.run_coroutine_threadsafe(engine.__aexit__(None, None, None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def urls_of(run_dir: Path, replicas: int, timeout_s: float, one_is_enough: bool = False) -> list[str]:
    engine = SimpleNamespace(urls=[], replicas=replicas, ready_timeout_s=timeout_s)
    return engine_urls(SimpleNamespace(run_dir=run_dir, engine=engine, one_engine_is_enough=one_is_enough))


SORTING = {"components": [{"name": "sorting"}], "workers": 0}
SMALL = {"dynamic_sampling": "off", "groups_per_step": 2, "group_size": 2}


def test_a_controller_that_never_appears_is_named_with_what_was_waited_for(tmp_path):
    with pytest.raises(ControllerError) as caught:
        ControllerClient(tmp_path, timeout_s=0.2).step_status(0)
    assert "waited 0.2 s for the controller to publish" in str(caught.value)
    assert str(controller_file(tmp_path)) in str(caught.value)
    assert "controller-0.log" in str(caught.value)


def test_an_endpoint_file_left_by_an_earlier_run_is_not_believed(tmp_path):
    publish(tmp_path, Endpoint("http://127.0.0.1:9", 1, "old"))  # the discard port: nobody listens
    with pytest.raises(ControllerError, match=r"http://127\.0\.0\.1:9 does not answer"):
        ControllerClient(tmp_path, timeout_s=0.2).step_status(0)


def test_the_endpoint_file_is_readable_by_its_owner_only(tmp_path):
    path = publish(tmp_path, Endpoint("http://x", 1, "secret"))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert read(tmp_path) == Endpoint("http://x", 1, "secret")
    assert [p.name for p in path.parent.iterdir()] == ["controller.json"]


def test_engines_that_do_not_appear_are_named(tmp_path):
    (tmp_path / "endpoints").mkdir()
    (tmp_path / "endpoints" / "engine-0.json").write_text('{"url": "http://a"}')
    assert urls_of(tmp_path, 1, 0.0) == ["http://a"]
    with pytest.raises(TimeoutError, match=r"engine-1\.json"):
        urls_of(tmp_path, 2, 0.1)


@pytest.mark.parametrize("failed", [True, False])
def test_where_one_engine_is_enough_a_late_or_failed_one_is_named_by_its_address(tmp_path, failed):
    (tmp_path / "endpoints").mkdir()
    for name in ("address-0", "engine-1", "address-1"):
        (tmp_path / "endpoints" / f"{name}.json").write_text(f'{{"url": "http://{name}"}}')
    if failed:
        (tmp_path / "endpoints" / "failed-0.json").touch()
    urls = urls_of(tmp_path, 2, 600.0 if failed else 0.1, one_is_enough=True)
    assert urls == ["http://address-0", "http://engine-1"]
    (tmp_path / "endpoints" / "engine-1.json").unlink()
    with pytest.raises(TimeoutError, match=r"engine-0\.json, .*engine-1\.json"):
        urls_of(tmp_path, 2, 0.1, one_is_enough=True)


def test_only_engines_that_the_run_has_started_have_their_logs_here(tmp_path):
    (tmp_path / "endpoints").mkdir()
    (tmp_path / "endpoints" / "engine-1.json").write_text('{"url": "http://b"}')
    assert engine_logs(tmp_path, ["http://a", "http://b"]) == {"http://b": tmp_path / "logs" / "engine-1.log"}


def test_a_request_without_the_token_is_refused(tmp_path, model):
    with running(FakeEngine()) as url:
        cfg = config(tmp_path, model, [url], reward=SORTING)
        with running_controller(cfg), ControllerClient(tmp_path) as client:
            client.step_status(0)
            endpoint = read(tmp_path)
            assert endpoint is not None
            client._endpoint = Endpoint(endpoint.url, endpoint.pid, "guess")
            with pytest.raises(ControllerError, match=r"bearer token.*401"):
                client.get_state()


def test_a_step_that_never_gets_ready_ends_the_wait_and_says_how_far_it_is(tmp_path, model):
    engine = FakeEngine()
    engine.always = engine.hang()
    with running(engine) as url:
        cfg = config(tmp_path, model, [url], reward=SORTING, rollout=SMALL)
        with running_controller(cfg), ControllerClient(tmp_path) as client:
            assert client.step_status(0).status == "waiting"
            client.set_weights_version(0)
            with pytest.raises(ControllerError) as caught:
                client.wait_ready(0, timeout_s=0.3)
            with pytest.raises(ControllerError, match=r"step 0 is not ready.*409"):
                client.table(0)
    assert "waited 0.3 s for the rollouts of step 0; the controller is generating" in str(caught.value)
    assert "'groups_needed': 2" in str(caught.value)


def test_an_update_waits_for_the_next_batch_unless_no_engine_is_left_to_make_it(tmp_path, model):
    """One step off: the engine stops in the middle of the next batch, and would serve again with new weights."""
    good = FakeEngine().always
    engine = FakeEngine(good, good)
    engine.always, engine.loaded = engine.hang(), "0"
    rollout = {**SMALL, "mode": "one_step_off"}
    with running(engine) as url:
        cfg = config(tmp_path, model, [url], reward=SORTING, rollout=rollout, deterministic=False)
        with running_controller(cfg), ControllerClient(tmp_path) as client:
            with pytest.raises(ControllerError, match=r"step 0 is not ready.*409"):
                client.wait_update(1, timeout_s=10)
            client.set_weights_version(0)
            client.wait_ready(0, timeout_s=60)
            asked = iter([False, True])
            client.wait_update(1, timeout_s=60, interrupted=lambda: next(asked))
            with pytest.raises(
                ControllerError, match=r"waited 0.3 s for engines free for weights 1.*2 missing in the n"
            ):
                client.wait_update(1, timeout_s=0.3)
            client.set_weights_version(1, serving=[], start=False)
            client.wait_update(1, timeout_s=60)


def test_an_engine_without_the_weights_is_named_until_it_was_given_them(tmp_path, model):
    engine = FakeEngine()
    engine.always = engine.hang()
    with running(engine) as url:
        cfg = config(tmp_path, model, [url], reward=SORTING, rollout=SMALL)
        with running_controller(cfg), ControllerClient(tmp_path) as client:
            client.set_weights_version(0, [])
            named = client.wait_ready(0, timeout_s=60, enough=lambda status: bool(status.needs_weights))
            assert named.needs_weights == [url]
            client.set_weights_version(0, [], start=False, repaired=True)
            assert client.step_status(0).needs_weights == [url]
            client.set_weights_version(0, [url], start=False, repaired=True)
            assert client.step_status(0).needs_weights == []


def test_who_holds_weights_and_their_checksum_reach_the_controller(tmp_path, monkeypatch):
    told = []
    controller = SimpleNamespace(publish=lambda **words: told.append(words))
    routes = _Routes(controller)

    def post(path, body):
        asyncio.run(routes.weights(SimpleNamespace(read=AsyncMock(return_value=orjson.dumps(body)))))

    client = ControllerClient(tmp_path)
    monkeypatch.setattr(client, "_post", post)
    client.set_weights_version(3)
    client.set_weights_version(4, ["http://a"], "sum", start=False, repaired=True)
    assert told == [
        {"version": 3, "serving": None, "checksum": None, "start": True, "repaired": False},
        {"version": 4, "serving": ["http://a"], "checksum": "sum", "start": False, "repaired": True},
    ]


def test_an_engine_that_refuses_fails_the_step_with_its_own_words(tmp_path, model):
    engine = FakeEngine()
    engine.always = says(400, {"error": {"message": "The input is longer than the model's context length"}})
    with running(engine) as url:
        cfg = config(tmp_path, model, [url], reward=SORTING, rollout=SMALL)
        with running_controller(cfg), ControllerClient(tmp_path) as client:
            client.set_weights_version(0)
            with pytest.raises(ControllerError) as caught:
                client.wait_ready(0, timeout_s=20)
    assert "the rollouts of step 0: the controller failed: step 0" in str(caught.value)
    assert f"engine {url}: /generate refused with HTTP 400: The input is longer" in str(caught.value)


def test_what_an_engine_says_against_an_evaluation_reaches_the_trainer(tmp_path, model):
    engine = FakeEngine()
    engine.always = says(400, {"error": {"message": "The input is longer than the context"}})
    with running(engine) as url:
        data = {"eval_prompts": str(write_prompts(tmp_path / "eval.jsonl", 3, stem="e"))}
        cfg = config(tmp_path, model, [url], reward=SORTING, rollout=SMALL, data=data)
        with running_controller(cfg), ControllerClient(tmp_path) as client:
            with pytest.raises(ControllerError) as caught:
                client.evaluate(step=0, prompts=3)
    assert (
        f"the evaluation at step 0: the controller failed: engine {url}: /generate refused with HTTP 400: The input is"
        in str(caught.value)
    )


def test_an_evaluation_tells_why_engines_do_not_serve_and_ends_when_none_ever_will(tmp_path, model):
    with running(FakeEngine(control={"/model_info": (200, {"vocab_size": 3})})) as url:
        data = {"eval_prompts": str(write_prompts(tmp_path / "eval.jsonl", 3, stem="e"))}
        cfg = config(tmp_path, model, [url], reward=SORTING, rollout=SMALL, data=data)
        with running_controller(cfg), ControllerClient(tmp_path) as client:
            with pytest.raises(ControllerError, match=r"none of the engines .* can serve this run.*vocab_size=3"):
                client.evaluate(step=0, prompts=3)
    engine = FakeEngine()
    engine.always = engine.hang()
    with running(engine) as url, running(FakeEngine(control={"/model_info": (200, {"vocab_size": 3})})) as other:
        cfg = config(tmp_path, model, [url, other], reward=SORTING, rollout=SMALL, data=data)
        seen: list[dict[str, str]] = [{}]

        def judged() -> bool:
            return seen[-1].get(url) == "" and "vocab_size=3" in seen[-1][other]

        with running_controller(cfg), ControllerClient(tmp_path) as client:
            assert client.evaluate(step=0, prompts=3, timeout_s=60, look=seen.append, interrupted=judged) is None
        engine.recover()


def test_an_evaluation_is_left_when_the_run_is_to_end(tmp_path, model):
    engine = FakeEngine()
    engine.always = engine.hang()
    with running(engine) as url:
        data = {"eval_prompts": str(write_prompts(tmp_path / "eval.jsonl", 3, stem="e"))}
        cfg = config(tmp_path, model, [url], reward=SORTING, rollout=SMALL, data=data)
        with running_controller(cfg), ControllerClient(tmp_path) as client:
            asked = iter([False, True])
            assert client.evaluate(step=0, prompts=3, interrupted=lambda: next(asked)) is None
        engine.recover()


def test_a_verifier_that_fails_fails_the_step_when_asked_to(tmp_path, model):
    with running(FakeEngine()) as url:
        reward = {"components": [{"name": "tests.unit.rollout_hooks:raises"}], "workers": 1, "on_error": "fail"}
        cfg = config(tmp_path, model, [url], reward=reward, rollout=SMALL)
        with running_controller(cfg), ControllerClient(tmp_path) as client:
            client.set_weights_version(0)
            with pytest.raises(ControllerError, match=r"the controller failed.*no reward for a response to prompt"):
                client.wait_ready(0, timeout_s=60)


def test_weights_of_another_step_evaluations_without_prompts_and_unknown_routes_are_refused(tmp_path, model):
    with running(FakeEngine()) as url:
        cfg = config(tmp_path, model, [url], reward=SORTING, rollout=SMALL)
        with running_controller(cfg), ControllerClient(tmp_path) as client:
            with pytest.raises(ControllerError, match=r"version 3 was published.*409"):
                client.set_weights_version(3)
            client.set_weights_version(0)
            client.wait_ready(0, timeout_s=20)
            with pytest.raises(ControllerError, match=r"no held-out prompts: set data\.eval_prompts"):
                client.evaluate(step=0, prompts=1)
            with pytest.raises(ControllerError, match=r"404"):
                client._get("/v1/nothing")
            assert np.array_equal(RolloutTable.from_bytes(client.table(0)).response_length, [2, 2, 2, 2])


def test_a_controller_that_is_gone_is_an_error_and_not_a_hang(tmp_path, model):
    with running(FakeEngine()) as url:
        client = ControllerClient(tmp_path)
        with running_controller(config(tmp_path, model, [url], reward=SORTING)):
            client.step_status(0)
        assert not controller_file(tmp_path).exists()
        with pytest.raises(ControllerError, match="does not answer"):
            client.step_status(0)
        client.close()
