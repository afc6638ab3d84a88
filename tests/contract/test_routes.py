"""Routes of experts over HTTP: both servers report those of transformers' own forward, for the tokens asked for."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.rollout.answers import parse_generations
from megatron_rl.rollout.protocol import Prompt, SamplingSettings
from megatron_rl.rollout.routed import RouteFormat
from megatron_rl.weights.transports.group import in_thread
from tests.contract.servers import (
    NO_SGLANG,
    SGLANG,
    Server,
    launch_embedded,
    launch_sglang,
    wait_until_ready,
)
from tests.contract.test_weight_sessions import by_broadcast, by_value
from tests.contract.trainer import tensors_of
from tests.tiny import tiny_model

CONTEXT, LAYERS, TOP_K, EXPERTS = 1024, 2, 2, 8
PROMPT = [90, 91, 92, 93, 94]
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two tiny models with experts that differ in all weights."""
    folder = tmp_path_factory.mktemp("experts")
    made = [tiny_model(folder / str(i), "qwen3_moe", seed=i, max_position_embeddings=CONTEXT) for i in range(2)]
    return made[0], made[1]


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.slow)])
def server(
    request: pytest.FixtureRequest, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One of each kind that keeps routes, serving the first model; tests leave it so. SGLang's is a second one."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "sglang" and not SGLANG.exists():
        pytest.skip(NO_SGLANG)
    if request.param == "sglang":
        started = launch_sglang(folder, *models, 4, CONTEXT, routed_experts=True)
    else:
        started = launch_embedded(folder, *models, 4, "--enable-return-routed-experts")
    try:
        yield wait_until_ready(started)
    finally:
        code = started.stop()
    assert not code, started.log.read_text()[-2000:]


@pytest.fixture(scope="module")
def references(models: tuple[Path, Path]) -> list[Any]:
    """Both models in transformers."""
    return [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in models]


def expected(model: Any, tokens: list[int]) -> np.ndarray:
    """Experts of transformers' own forward, ascending, [tokens, layers, top_k]."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    return np.sort(np.stack([values.topk(TOP_K, -1).indices.numpy() for values in logits], 1), -1)


def ask(server: Server, input_ids: Any, start: int | None = 0, **params: Any) -> Any:
    """/generate with log-probs, and with routes from `start` on unless that is None."""
    outer = {name: params.pop(name) for name in ("rid",) if name in params}
    body = {"input_ids": input_ids, "sampling_params": {**GREEDY, **params}, "return_logprob": True, **outer}
    if start is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": start}
    return server.ok("/generate", body)


def rows(answer: dict[str, Any]) -> np.ndarray:
    """Its routes, in the order in which the server names experts."""
    raw = base64.b64decode(answer["meta_info"]["routed_experts"], validate=True)
    return np.frombuffer(raw, np.int32).reshape(-1, LAYERS, TOP_K)


def test_every_token_that_was_read_is_reported(server: Server, references: list[Any]) -> None:
    answer = ask(server, PROMPT, max_new_tokens=40)
    tokens = PROMPT + answer["output_ids"]
    found = rows(answer)
    assert len(found) == len(tokens) - 1
    np.testing.assert_array_equal(np.sort(found, -1), expected(references[0], tokens[:-1]))


@pytest.mark.parametrize("start", [1, 4, 5])
def test_a_start_leaves_out_the_tokens_before_it(server: Server, references: list[Any], start: int) -> None:
    answer = ask(server, PROMPT, start=start, max_new_tokens=6)
    tokens = PROMPT + answer["output_ids"]
    np.testing.assert_array_equal(np.sort(rows(answer), -1), expected(references[0], tokens[:-1])[start:])


def test_one_token_of_which_nothing_is_missing_reports_nothing(server: Server) -> None:
    answer = ask(server, PROMPT, start=4, max_new_tokens=1)
    assert rows(answer).shape == (1, LAYERS, TOP_K)
    assert rows(ask(server, PROMPT, start=5, max_new_tokens=1)).shape == (0, LAYERS, TOP_K)


@pytest.mark.parametrize("start", [-1, 6])
def test_a_start_that_cannot_be_is_refused(server: Server, start: int) -> None:
    body = {"input_ids": PROMPT, "return_routed_experts": True, "routed_experts_start_len": start}
    answer = server.call("/generate", {**body, "sampling_params": {"max_new_tokens": 2}})
    assert answer.status == 400
    assert f"routed_experts_start_len={start} is {'lower' if start < 0 else 'higher'} than" in answer.message


def test_a_batch_and_equal_prompts_report_each_their_own(server: Server, references: list[Any]) -> None:
    prompts = [PROMPT, PROMPT[:2], PROMPT, [17, 18, 19] * 7]
    answers = ask(server, prompts, max_new_tokens=9, temperature=1.0)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = prompt + answer["output_ids"]
        np.testing.assert_array_equal(np.sort(rows(answer), -1), expected(references[0], tokens[:-1]))


def test_segments_report_what_is_new_from_the_cache_and_without_it(server: Server, references: list[Any]) -> None:
    for flush in (False, True):
        tokens, found = list(PROMPT), list[np.ndarray]()
        for segment in range(3):
            answer = ask(server, tokens, start=sum(map(len, found)), max_new_tokens=7)
            found.append(rows(answer))
            tokens += [*answer["output_ids"], *([5, 6, 7] if segment == 1 else [])]  # as an environment would
            if flush:
                server.ok("/flush_cache", {})
        assert [len(part) for part in found] == [11, 7, 10]
        np.testing.assert_array_equal(np.sort(np.concatenate(found), -1), expected(references[0], tokens[:-1]))


def test_an_aborted_response_reports_what_it_has(server: Server, references: list[Any]) -> None:
    future = in_thread(lambda: ask(server, PROMPT, max_new_tokens=900, rid="s-0.0001"))
    server.wait_for_load("some tokens", lambda load: load["num_used_tokens"] >= len(PROMPT) + 10)
    server.ok("/abort_request", {"rid": "s-0.0001"})
    answer = future.result(60)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    tokens = PROMPT + answer["output_ids"]
    np.testing.assert_array_equal(np.sort(rows(answer), -1), expected(references[0], tokens[:-1]))


def test_who_does_not_ask_is_told_nothing(server: Server) -> None:
    assert "routed_experts" not in ask(server, PROMPT, start=None, max_new_tokens=2)["meta_info"]
    assert server.ok("/server_info")["enable_return_routed_experts"] is True


def test_our_client_reads_the_answer(server: Server, references: list[Any]) -> None:
    settings = SamplingSettings(1.0, 8, routes="pack")
    answer = ask(server, [PROMPT], start=2, rid=["r"], max_new_tokens=8)
    form = RouteFormat("", LAYERS, range(LAYERS), TOP_K, EXPERTS)
    prompt = Prompt("r", np.array(PROMPT), 0, 8, settings, routed=2)
    body = orjson.dumps(answer).replace(b'"w0"', b'"0"')  # a run numbers its weights
    (found,) = parse_generations(body, [prompt], url=server.url, vocab_size=320, routes=form)
    assert found.rows is not None
    tokens = PROMPT + found.tokens.tolist()
    np.testing.assert_array_equal(np.sort(found.rows, -1), expected(references[0], tokens[:-1])[2:])


@pytest.mark.parametrize("way", [by_broadcast, by_value])
def test_new_weights_of_experts_arrive_by_the_names_of_the_checkpoint(
    server: Server, references: list[Any], way: Callable[..., None]
) -> None:
    server.ok("/update_weights_from_disk", {"model_path": str(server.other_model)})
    from_disk = server.checksums()
    server.ok("/update_weights_from_disk", {"model_path": str(server.model)})
    before = server.checksums()
    for model, reference, checksums in (
        (server.other_model, references[1], from_disk),
        (server.model, references[0], before),
    ):
        way(server, tensors_of(model))
        assert server.checksums() == checksums
        server.ok("/flush_cache", {})
        answer = ask(server, PROMPT, max_new_tokens=12)
        tokens = PROMPT + answer["output_ids"]
        np.testing.assert_array_equal(np.sort(rows(answer), -1), expected(reference, tokens[:-1]))
    assert before != from_disk
