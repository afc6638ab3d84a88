"""What the trainer sends is what the servers take: process groups, values and descriptions of buckets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.rollout.control import EngineControl
from megatron_rl.weights.buckets import Bucket, TensorSpec, plan_buckets
from megatron_rl.weights.transports import handles
from megatron_rl.weights.transports.group import UpdateGroup
from tests.contract.conftest import Reference
from tests.contract.servers import Server
from tests.contract.trainer import tensors_of

TIMEOUT_S = 60.0


@contextmanager
def update(server: Server) -> Iterator[EngineControl]:
    """A whole update to version 8 with a session; the weights are sent within."""
    server.updated = True
    control = EngineControl([server.url], api_key=server.api_key, timeout_s=TIMEOUT_S)
    steps = control.begin_update(8)
    steps.pause("retract")
    steps.begin()
    yield control
    steps.end()
    steps.compare()
    steps.resume()
    assert steps.failed == {}
    control.close()


def buckets_of(model: Path) -> Iterator[tuple[Bucket, torch.Tensor]]:
    tensors = dict(tensors_of(model))
    specs = [[TensorSpec(name, tuple(tensor.shape), tensor.dtype)] for name, tensor in tensors.items()]
    for bucket in plan_buckets(specs, 50_000):
        flat = torch.empty(bucket.nbytes + 64, dtype=torch.uint8)  # buffers are longer than most buckets
        for name, view in bucket.views(flat).items():
            view.copy_(tensors[name])
        yield bucket, flat


@pytest.fixture
def from_disk(server: Server) -> dict[str, str]:
    """Checksums of the other model."""
    server.ok("/update_weights_from_disk", {"model_path": str(server.other_model)})
    found = server.checksums()
    server.ok("/update_weights_from_disk", {"model_path": str(server.model)})
    assert server.checksums() != found
    return found


def test_a_process_group_brings_all_buckets(
    server: Server, from_disk: dict[str, str], other_reference: Reference
) -> None:
    with update(server) as control:
        group = UpdateGroup(control.calls, [server.url], 1, "contract", "gloo", TIMEOUT_S)
        group.join()
        for bucket, flat in buckets_of(server.other_model):
            group.start(bucket, flat)
            group.finish()
        group.close()
        assert group.failed is None
    assert server.checksums() == from_disk
    assert server.ok("/model_info")["weight_version"] == "8"
    prompt = [70, 71, 72, 73]
    probe = control.begin_update(8)
    expected = other_reference.log_probs(prompt[:1], prompt[1:], 1.0)
    probe.probe(prompt, expected, tolerance=1e-4)
    assert probe.failed == {}
    control.close()


class OnCpu(handles._HandlePickler):
    """The bucket's description as it is; the buffer by value, since there is no device here."""

    def reducer_override(self, value: Any) -> Any:
        return NotImplemented


@pytest.mark.parametrize("described", [False, True], ids=["values", "described bucket"])
def test_bodies_of_requests_bring_all_buckets(
    server: Server, from_disk: dict[str, str], described: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handles, "_HandlePickler", OnCpu)
    make = handles.handle_payload if described else handles.value_payload
    with update(server) as control:
        for bucket, flat in buckets_of(server.other_model):
            body = {
                "serialized_named_tensors": [make(bucket, flat)],
                "load_format": "flattened_bucket" if described else None,
                "flush_cache": False,
            }
            calls = control.calls.post("/update_weights_from_tensor", {server.url: body}, TIMEOUT_S)
            calls.result().require_all("tensors")
    assert server.checksums() == from_disk
