"""What is refused: always status 400 with error.message, never a guess at what was meant."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.servers import Server, generate_body

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("negative temperature", {"temperature": -1}, "temperature must be a non-negative finite number"),
    ("top_p of zero", {"top_p": 0}, "top_p must be in (0, 1]"),
    ("top_p above one", {"top_p": 1.5}, "top_p must be in (0, 1]"),
    ("top_k of zero", {"top_k": 0}, "top_k must be -1 (disable) or at least 1"),
    ("min_p above one", {"min_p": 1.1}, "min_p must be in [0, 1]"),
    ("negative max_new_tokens", {"max_new_tokens": -1}, "max_new_tokens must be at least 0"),
    ("response beyond the context", {"max_new_tokens": 4096}, "maximum context length of 4096"),
    ("seed beyond 63 bits", {"sampling_seed": 2**63}, "sampling_seed"),
]


@pytest.mark.parametrize(("params", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_sampling_parameters_out_of_range(server: Server, params: dict[str, Any], message: str) -> None:
    answer = server.call("/generate", generate_body([5, 6, 7], **params))
    assert answer.status == 400
    assert message in answer.message


@pytest.mark.parametrize(
    ("input_ids", "message"),
    [
        pytest.param([], "empty", id="no tokens"),
        pytest.param([5] * 4096, "The input (4096 tokens) is longer than the model's context length", id="too long"),
        pytest.param([5, "six"], "six", id="not a number"),
    ],
)
def test_input_ids_that_cannot_be_used(server: Server, input_ids: Any, message: str) -> None:
    answer = server.call("/generate", generate_body(input_ids, max_new_tokens=1))
    assert answer.status == 400
    assert message in answer.message


@pytest.mark.parametrize(
    ("input_ids", "message"),
    [
        pytest.param([[5], []], "empty", id="no tokens in one of a batch"),
        pytest.param([5, 320], "320", id="beyond the vocabulary"),
        pytest.param([5, -1], "-1", id="negative"),
    ],
)
def test_input_ids_that_the_client_never_sends(embedded_server: Server, input_ids: Any, message: str) -> None:
    """A real SGLang takes these and dies of them; see `megatron_rl.rollout.protocol.require_prompts`."""
    answer = embedded_server.call("/generate", generate_body(input_ids, max_new_tokens=1))
    assert answer.status == 400
    assert message in answer.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"rid": ["a."]}, "rid", id="fewer rids than sequences"),
        pytest.param({"rid": ["a.", "a."]}, "Duplicate request ID", id="rid twice"),
        pytest.param({"sampling_params": [{"n": 1}, {"n": 2}]}, "should be the same", id="different n"),
    ],
)
def test_bodies_that_contradict_themselves(server: Server, change: dict[str, Any], message: str) -> None:
    answer = server.call("/generate", {"input_ids": [[5], [6]], **change})
    assert answer.status == 400
    assert message in answer.message


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("sampling_params", {"sampling_params": [{}]}),  # fewer than sequences
        ("stream", {"stream": True}),
        ("stop", {"sampling_params": {"stop": "x"}}),
        ("sampling_parms", {"sampling_parms": {}}),
    ],
)
def test_the_embedded_engine_refuses_what_it_does_not_know(
    embedded_server: Server, name: str, change: dict[str, Any]
) -> None:
    answer = embedded_server.call("/generate", {"input_ids": [[5], [6]], **change})
    assert answer.status == 400
    assert name in answer.message


def test_rid_in_use_is_refused_until_it_is_free_again(server: Server) -> None:
    running = server.generate_later([5, 6], rid="twice", max_new_tokens=3000, ignore_eos=True)
    server.wait_for_load("the request to run", lambda load: load["num_running_reqs"] == 1)
    answer = server.call("/generate", generate_body([5, 6], rid="twice", max_new_tokens=1))
    assert answer.status == 400
    assert "Duplicate request ID" in answer.message
    server.ok("/abort_request", {"rid": "twice"})
    assert running.result(60)["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(server.generate([5, 6], rid="twice", max_new_tokens=1)["output_ids"]) == 1


def test_body_that_is_no_json(server: Server) -> None:
    assert server.call("/generate", "not an object").status == 400


def test_unknown_pause_mode(server: Server) -> None:
    answer = server.call("/pause_generation", {"mode": "gently"})
    assert answer.status == 400
    assert "gently" in answer.message
    assert len(server.generate([5], max_new_tokens=1)["output_ids"]) == 1  # not paused
