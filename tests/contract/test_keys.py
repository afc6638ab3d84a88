"""The bearer token that a server asks for: wanted on every route that tells or changes something."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.contract.conftest import server_of
from tests.contract.servers import Server


@pytest.fixture(params=["embedded", "sglang"])
def locked_server(request: pytest.FixtureRequest) -> Server:
    """A server that was started with a key."""
    return server_of(request, 1 if request.param == "embedded" else 2)


@pytest.mark.parametrize("key", [None, "wrong"])
def test_calls_without_the_key_are_refused_and_health_is_open(locked_server: Server, key: str | None) -> None:
    assert locked_server.ok("/model_info")
    stranger = replace(locked_server, api_key=key)
    for path, body in (
        ("/generate", {"input_ids": [5]}),
        ("/abort_request", {"abort_all": True}),
        ("/pause_generation", {"mode": "retract"}),
        ("/update_weights_from_disk", {"model_path": str(locked_server.other_model)}),
        ("/begin_weight_update", {}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [""]}),
        ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}),
        ("/init_weights_update_group", {"master_address": "", "master_port": 1, "rank_offset": 1, "world_size": 2}),
        ("/update_weight_version", {"new_version": "w9"}),
        ("/release_memory_occupation", {}),
        ("/weights_checker", {"action": "checksum"}),
        ("/model_info", None),
        ("/v1/loads", None),
    ):
        answer = stranger.call(path, body)
        assert answer.status == 401, path
        assert answer.body == {"error": "Unauthorized"}
    for path in ("/ready", "/health"):
        assert stranger.call(path).status == 200


def test_the_embedded_engine_does_not_tell_its_key(deterministic_server: Server) -> None:
    assert "api_key" not in deterministic_server.ok("/server_info")
