"""Weights from memory: sessions, process groups, request bodies, and what they may be mixed with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.conftest import Reference
from tests.contract.servers import Server
from tests.contract.trainer import NamedTensors, description, encode, payload, sender, session, split, tensors_of

PROMPT = [70, 71, 72, 73]
LONG = {"max_new_tokens": 3000, "ignore_eos": True}
Way = Callable[[Server, NamedTensors], None]


def put(server: Server, tensors: NamedTensors, flattened: bool = False) -> Any:
    """The answer to tensors that are sent in the body of a request."""
    body = {
        "serialized_named_tensors": [payload(tensors, flattened)],
        "load_format": "flattened_bucket" if flattened else None,
        "flush_cache": False,
    }
    server.updated = True
    return server.call("/update_weights_from_tensor", body)


def by_broadcast(server: Server, tensors: NamedTensors) -> None:
    server.updated = True
    with sender(server) as trainer, session(server):
        for bucket in split(tensors, 3):
            answer = trainer.send(bucket)
            assert answer.status == 200, answer
            assert answer.body["success"] is True


def by_value(server: Server, tensors: NamedTensors, flattened: bool = False) -> None:
    with session(server):
        for bucket in split(tensors, 3):
            assert put(server, bucket, flattened).body == {"success": True, "message": "Success"}


def by_flattened_value(server: Server, tensors: NamedTensors) -> None:
    by_value(server, tensors, flattened=True)


@pytest.mark.parametrize("way", [by_broadcast, by_value, by_flattened_value])
def test_all_ways_lead_to_the_same_weights(server: Server, other_reference: Reference, way: Way) -> None:
    before = server.checksums()
    server.ok("/update_weights_from_disk", {"model_path": str(server.other_model)})
    from_disk = server.checksums()
    server.ok("/update_weights_from_disk", {"model_path": str(server.model)})
    assert server.checksums() == before != from_disk
    way(server, tensors_of(server.other_model))
    assert server.checksums() == from_disk
    server.ok("/flush_cache", {})
    answer = server.generate(PROMPT, max_new_tokens=12, temperature=0, ignore_eos=True)
    assert answer["output_ids"] == other_reference.greedy(PROMPT, 12)


def test_the_version_follows_the_tensors(server: Server) -> None:
    with session(server):
        assert put(server, tensors_of(server.other_model)).status == 200
        assert server.ok("/model_info")["weight_version"] == "w0"
        answer = server.ok("/update_weight_version", {"new_version": "w2", "abort_all_requests": False})
    assert answer == {"success": True, "message": "Weight version updated to w2", "new_version": "w2"}
    assert server.ok("/model_info")["weight_version"] == "w2"
    assert server.generate(PROMPT, max_new_tokens=1)["meta_info"]["weight_version"] == "w2"


def test_a_new_version_is_that_of_the_tokens_that_follow(server: Server) -> None:
    server.updated = True
    future = server.generate_later(PROMPT, rid="long.", **LONG)
    load = server.wait_for_load("some tokens", lambda load: load["num_used_tokens"] >= len(PROMPT) + 10)
    server.ok("/update_weight_version", {"new_version": "w1", "abort_all_requests": False})
    enough = load["num_used_tokens"] + 20
    server.wait_for_load("more", lambda load: load["num_used_tokens"] > enough or not load["num_running_reqs"])
    server.ok("/abort_request", {"rid": "long."})
    meta = future.result(60)["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert [span["version"] for span in meta["weight_versions"]] == ["w0", "w1"]


def test_updates_from_memory_want_a_session(server: Server) -> None:
    tensors = tensors_of(server.other_model)
    before = server.checksums()
    answer = put(server, tensors)
    assert answer.status == 400
    assert answer.body["success"] is False
    assert "update_weights_from_tensor must run between begin_weight_update()" in answer.body["message"]
    answer = server.call("/update_weights_from_distributed", {**description(tensors), "group_name": "nobody's"})
    assert answer.status == 400
    assert "update_weights_from_distributed must run between begin_weight_update()" in answer.body["message"]
    assert server.checksums() == before


def test_there_is_one_session_at_a_time_and_it_keeps_nobody_from_generating(server: Server) -> None:
    answer = server.call("/end_weight_update", {})
    assert answer.status == 400
    assert "no weight-update session is open" in answer.body["message"]
    assert server.ok("/begin_weight_update", {"selector": "all"}) == {"success": True, "message": "Success"}
    answer = server.call("/begin_weight_update", {})
    assert answer.status == 400
    assert "a weight-update session is already open" in answer.body["message"]
    assert len(server.generate(PROMPT, max_new_tokens=2, ignore_eos=True)["output_ids"]) == 2
    server.ok("/update_weights_from_disk", {"model_path": str(server.model), "weight_version": "w0"})
    assert server.ok("/end_weight_update", {}) == {"success": True, "message": "Success"}


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_session_in_a_pause_gives_each_token_its_version(server: Server, mode: str) -> None:
    tensors = tensors_of(server.other_model)
    future = server.generate_later(PROMPT, rid="long.", **LONG)
    server.wait_for_load("some tokens", lambda load: load["num_used_tokens"] >= len(PROMPT) + 10)
    with sender(server) as trainer:
        server.ok("/pause_generation", {"mode": mode})
        if mode == "retract":
            server.ok("/flush_cache", {})
        with session(server):
            for bucket in split(tensors, 2):
                assert trainer.send(bucket).status == 200
            server.ok("/update_weight_version", {"new_version": "w1", "abort_all_requests": False})
        server.updated = True
        server.ok("/continue_generation", {})
    load = server.wait_for_load("it to run", lambda load: load["num_running_reqs"] == 1)
    enough = load["num_used_tokens"] + 20
    server.wait_for_load("more", lambda load: load["num_used_tokens"] > enough)
    server.ok("/abort_request", {"rid": "long."})
    answer = future.result(60)
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["w0", "w1"]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], len(answer["output_ids"]))
    assert spans[0]["end"] >= 10
    assert answer["meta_info"]["num_retractions"] == (mode == "retract")
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])


def test_a_trainer_that_goes_away_fails_the_update_and_not_the_server(server: Server) -> None:
    before = server.checksums()
    with sender(server) as trainer:
        server.ok("/begin_weight_update", {})
        answer = trainer.announce(tensors_of(server.other_model))
        assert server.call("/ready").status == 200
        assert not answer.done()
        trainer.close()
        refused = answer.result(60)
        assert refused.status == 400
        assert "Failed to receive weights" in refused.body["message"]
    server.ok("/end_weight_update", {})
    assert server.checksums() == before
    assert len(server.generate(PROMPT, max_new_tokens=2, ignore_eos=True)["output_ids"]) == 2


def test_groups_that_do_not_exist_are_refused(server: Server) -> None:
    answer = server.call("/destroy_weights_update_group", {"group_name": "nobody's"})
    assert answer.status == 400
    assert "does not exist" in answer.body["message"]
    with session(server):
        body = {**description(tensors_of(server.other_model)), "group_name": "nobody's"}
        answer = server.call("/update_weights_from_distributed", body)
    assert answer.status == 400
    assert "init_weights_update_group" in answer.body["message"]


def test_a_broadcast_of_a_wrong_shape_is_refused(server: Server) -> None:
    server.updated = True
    wrong = [("model.norm.weight", torch.ones(65))]
    with sender(server) as trainer, session(server):
        answer = trainer.send(wrong)
        assert trainer.send(tensors_of(server.model)).status == 200  # the group is still in step
    assert answer.status == 400
    assert "discard the whole weights" in answer.body["message"]
    if server.kind == "embedded":
        assert "model.norm.weight has shape (65,), served is (64,)" in answer.body["message"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        pytest.param([("model.norm.weight", torch.ones(65))], "model.norm.weight has shape (65,)", id="shape"),
        pytest.param([("model.norm.bias", torch.ones(64))], "model.norm.bias is no parameter", id="unknown"),
        pytest.param([("model.norm.weight", torch.ones(64).byte())], "model.norm.weight holds", id="no numbers"),
    ],
)
def test_tensors_that_do_not_fit_are_named_and_none_of_their_bucket_is_used(
    embedded_server: Server, tensors: NamedTensors, message: str
) -> None:
    """A real SGLang ends at a wrong shape in a request's body, and passes over a name that it does not know."""
    server = embedded_server
    before = server.checksums()
    with session(server):
        answer = put(server, [*tensors_of(server.other_model)[:3], *tensors])
    assert answer.status == 400
    assert message in answer.body["message"]
    assert server.checksums() == before


@pytest.mark.parametrize("content", [[("model.norm.weight", np.ones(64))], print, {"a": 1}, 7], ids=repr)
def test_a_pickle_of_anything_else_is_refused(embedded_server: Server, content: Any) -> None:
    """A real SGLang ends at it."""
    with session(embedded_server):
        body = {"serialized_named_tensors": [encode(content)], "flush_cache": False}
        answer = embedded_server.call("/update_weights_from_tensor", body)
    assert answer.status == 400
    assert "serialized_named_tensors" in answer.body["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backend": "nccl"}, "nccl"),
        ({"rank_offset": 0}, "rank_offset"),
        ({"rank_offset": 2}, "rank_offset"),
        ({"group_name": ""}, "group_name"),
    ],
)
def test_groups_that_cannot_be_are_refused_at_once(
    embedded_server: Server, fields: dict[str, Any], message: str
) -> None:
    body = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    body |= {"group_name": "g", "backend": "gloo"}
    answer = embedded_server.call("/init_weights_update_group", {**body, **fields})
    assert answer.status == 400
    assert message in answer.body["message"]
