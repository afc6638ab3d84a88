"""Responses in pieces: continued from what is there, aborted and resumed, over pauses and new weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.contract.conftest import Reference
from tests.contract.servers import Server

PROMPT = [90, 91, 92, 93, 94]
GREEDY = {"temperature": 0, "ignore_eos": True}


def log_probs(answer: dict[str, Any]) -> list[float]:
    return [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]


def test_a_continued_response_is_found_in_the_cache_until_it_is_flushed(server: Server, reference: Reference) -> None:
    server.ok("/flush_cache", {})
    first = server.generate(PROMPT, max_new_tokens=12, rid="s-0.0001", **GREEDY)
    tokens = PROMPT + first["output_ids"]
    second = server.generate(tokens, max_new_tokens=12, rid="s-0.0002", **GREEDY)
    assert second["meta_info"]["cached_tokens"] == len(tokens) - 1
    assert second["meta_info"]["prompt_tokens"] == len(tokens)
    assert second["meta_info"]["weight_versions"] == [{"version": "w0", "start": 0, "end": 12}]
    tokens += second["output_ids"]
    assert tokens[len(PROMPT) :] == reference.greedy(PROMPT, 24)
    found = log_probs(first) + log_probs(second)
    np.testing.assert_allclose(found, reference.log_probs(PROMPT, tokens[len(PROMPT) :], 1.0), rtol=0, atol=1e-5)
    server.ok("/flush_cache", {})
    third = server.generate(tokens, max_new_tokens=2, rid="s-0.0003", **GREEDY)
    assert third["meta_info"]["cached_tokens"] == 0


def test_an_aborted_response_is_resumed_from_its_last_token(server: Server, reference: Reference) -> None:
    future = server.generate_later(PROMPT, max_new_tokens=3000, rid="s-0.0001", **GREEDY)
    server.wait_for_load("some tokens", lambda load: load["num_used_tokens"] >= len(PROMPT) + 10)
    server.ok("/abort_request", {"rid": "s-0.0001"})
    part = future.result(60)
    tokens = PROMPT + part["output_ids"]
    rest = server.generate(tokens, max_new_tokens=10, rid="s-0.0002", **GREEDY)
    assert rest["meta_info"]["cached_tokens"] == len(tokens) - 1
    output = part["output_ids"] + rest["output_ids"]
    expected = reference.log_probs(PROMPT, output, 1.0)
    np.testing.assert_allclose(log_probs(part) + log_probs(rest), expected, rtol=0, atol=1e-5)


def test_requests_of_new_weights_use_no_prefix_of_a_request_that_kept_its_own(
    server: Server, other_reference: Reference
) -> None:
    def ask(rid: str, key: str, length: int) -> dict[str, Any]:
        sampling = {"max_new_tokens": length, **GREEDY}
        body = {"rid": rid, "input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "extra_key": key}
        return dict(server.ok("/generate", body))

    server.ok("/flush_cache", {})
    ask("s-0.0001", "w0", 12)  # its keys and values stay: nothing can be flushed while the next one runs
    running = server.generate_later(PROMPT, max_new_tokens=3000, rid="s-1.0001", **GREEDY)
    server.wait_for_load("some tokens", lambda load: load["num_used_tokens"] >= len(PROMPT) + 10)
    server.ok("/pause_generation", {"mode": "in_place"})
    update = {"model_path": str(server.other_model), "weight_version": "w1", "flush_cache": False}
    server.ok("/update_weights_from_disk", update)
    server.ok("/continue_generation", {})
    fresh = ask("s-0.0002", "w1", 12)
    server.ok("/abort_request", {"rid": "s-1.0001"})
    running.result(60)
    assert fresh["meta_info"]["cached_tokens"] == 0
    expected = other_reference.log_probs(PROMPT, fresh["output_ids"], 1.0)
    np.testing.assert_allclose(log_probs(fresh), expected, rtol=0, atol=1e-5)


def test_new_weights_leave_nothing_in_the_cache(server: Server, other_reference: Reference) -> None:
    first = server.generate(PROMPT, max_new_tokens=12, **GREEDY)
    tokens = PROMPT + first["output_ids"]
    server.ok("/update_weights_from_disk", {"model_path": str(server.other_model), "weight_version": "w1"})
    rest = server.generate(tokens, max_new_tokens=12, **GREEDY)
    assert rest["meta_info"]["cached_tokens"] == 0
    expected = other_reference.log_probs(tokens, rest["output_ids"], 1.0)
    np.testing.assert_allclose(log_probs(rest), expected, rtol=0, atol=1e-5)


def test_a_prompt_is_scored_whole_although_it_is_cached(server: Server, reference: Reference) -> None:
    expected = reference.log_probs(PROMPT[:1], PROMPT[1:], 1.0)
    for _ in range(2):
        answer = server.generate(PROMPT, max_new_tokens=1, temperature=0, logprob_start_len=0)
        entries = answer["meta_info"]["input_token_logprobs"]
        assert [token for _, token, _ in entries] == PROMPT
        np.testing.assert_allclose([value for value, _, _ in entries[1:]], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_an_abort_in_a_pause_is_answered_once_the_pause_ends_at_the_latest(
    server: Server, reference: Reference, mode: str
) -> None:
    future = server.generate_later(PROMPT, max_new_tokens=3000, rid="s-0.0001", **GREEDY)
    server.wait_for_load("some tokens", lambda load: load["num_used_tokens"] >= len(PROMPT) + 10)
    server.ok("/pause_generation", {"mode": mode})
    server.ok("/abort_request", {"rid": "s-0.0001"})
    server.ok("/continue_generation", {})
    answer = future.result(60)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    output = answer["output_ids"]
    assert len(output) == len(log_probs(answer)) < 3000
    assert output[:30] == reference.greedy(PROMPT, len(output[:30]))
    if mode == "in_place" or server.kind == "embedded":  # a real SGLang keeps what it last told of a retracted one
        assert len(output) >= 10


def test_the_load_tells_running_from_waiting(server: Server) -> None:
    count = server.max_running_requests + 3
    futures = [server.generate_later(PROMPT, max_new_tokens=3000, rid=f"s-{i:03}.0001", **GREEDY) for i in range(count)]
    load = server.wait_for_load(
        "all to be there",
        lambda load: (load["num_running_reqs"], load["num_waiting_reqs"]) == (server.max_running_requests, 3),
    )
    assert load["num_used_tokens"] > 0
    server.ok("/abort_request", {"abort_all": True})
    answers = [future.result(60) for future in futures]
    assert [a["meta_info"]["finish_reason"]["type"] for a in answers] == ["abort"] * count
    assert sum(not a["output_ids"] for a in answers) == 3
    server.wait_for_load("nothing", lambda load: not load["num_running_reqs"] and not load["num_waiting_reqs"])
