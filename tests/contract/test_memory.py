"""Memory that is given away and taken back: when it may be, and the order of a colocated step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.conftest import Reference
from tests.contract.servers import Server
from tests.contract.trainer import payload, session, tensors_of

PROMPT = [80, 81, 82]


def test_an_idle_server_gives_memory_away_and_computes_the_same_afterwards(
    server: Server, reference: Reference
) -> None:
    for tags in (["kv_cache"], ["kv_cache", "weights"]):
        body = {"tags": tags}
        assert server.ok("/release_memory_occupation", body) is None
        assert server.call("/ready").status == 200
        assert server.ok("/resume_memory_occupation", body) is None
    answer = server.generate(PROMPT, max_new_tokens=10, temperature=0, ignore_eos=True)
    assert answer["output_ids"] == reference.greedy(PROMPT, 10)


def test_a_colocated_update_around_requests_that_were_retracted(server: Server, other_reference: Reference) -> None:
    future = server.generate_later(PROMPT, rid="long.", max_new_tokens=3000, ignore_eos=True, temperature=0)
    server.wait_for_load("some tokens", lambda load: load["num_used_tokens"] >= len(PROMPT) + 10)
    server.ok("/pause_generation", {"mode": "retract"})
    server.ok("/flush_cache", {})
    server.ok("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    server.ok("/resume_memory_occupation", {"tags": ["weights"]})
    server.updated = True
    with session(server):
        body = {"serialized_named_tensors": [payload(tensors_of(server.other_model))], "flush_cache": False}
        server.ok("/update_weights_from_tensor", body)
        server.ok("/update_weight_version", {"new_version": "w1", "abort_all_requests": False})
    server.ok("/resume_memory_occupation", {"tags": ["kv_cache"]})
    server.ok("/continue_generation", {})
    load = server.wait_for_load("it to run", lambda load: load["num_running_reqs"] == 1)
    server.wait_for_load("more", lambda now: now["num_used_tokens"] > load["num_used_tokens"] + 20)
    server.ok("/abort_request", {"rid": "long."})
    answer = future.result(60)
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["w0", "w1"]
    start = spans[1]["start"]
    found = [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]][start:]
    expected = other_reference.log_probs(PROMPT, answer["output_ids"], 1.0)[start:]
    assert found == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("mode", [None, "in_place"])
def test_memory_in_use_is_not_given_away(embedded_server: Server, mode: str | None) -> None:
    """A real SGLang ends at this, and at all that follows."""
    server = embedded_server
    future = server.generate_later(PROMPT, rid="long.", max_new_tokens=3000, ignore_eos=True)
    server.wait_for_load("it to run", lambda load: load["num_running_reqs"] == 1)
    if mode:
        server.ok("/pause_generation", {"mode": mode})
    answer = server.call("/release_memory_occupation", {"tags": ["kv_cache"]})
    assert answer.status == 400
    assert "only when server is idle" in answer.message
    server.ok("/continue_generation", {})
    server.ok("/abort_request", {"rid": "long."})
    assert future.result(60)["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    ("body", "message"),
    [({"tags": ["kv_cache"]}, "kv_cache is not released"), ({}, "tags"), ({"tags": ["gpu"]}, "gpu")],
    ids=str,
)
def test_only_what_was_given_away_can_be_taken_back(
    embedded_server: Server, body: dict[str, Any], message: str
) -> None:
    answer = embedded_server.call("/resume_memory_occupation", body)
    assert answer.status == 400
    assert message in answer.message


def test_nothing_is_computed_with_memory_that_was_given_away(embedded_server: Server) -> None:
    server = embedded_server
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    server.ok("/release_memory_occupation", {"tags": ["kv_cache"]})
    answer = server.call("/generate", body)
    assert answer.status == 400
    assert "released: kv_cache; call /resume_memory_occupation" in answer.message
    server.ok("/release_memory_occupation", {"tags": ["weights"]})
    for path, words in (
        ("/update_weights_from_disk", {"model_path": str(server.model)}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [""], "flush_cache": False}),
        ("/weights_checker", {"action": "checksum"}),
    ):
        answer = server.call(path, words)
        assert answer.status == 400, path
        assert "released: weights" in answer.body["message"]
    server.ok("/resume_memory_occupation", {"tags": ["weights"]})
    assert server.checksums()
    server.ok("/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert len(server.ok("/generate", body)["output_ids"]) == 1
