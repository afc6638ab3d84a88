"""Which transport a run takes and which rank serves which engine; messages between ranks; handles of memory."""

from __future__ import annotations

import base64
import io
import pickle
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config import Config
from megatron_rl.publisher import choose_transport, partners_of
from megatron_rl.rollout.fanout import Replies
from megatron_rl.rollout.protocol import EngineError
from megatron_rl.weights import WeightsError
from megatron_rl.weights.buckets import Bucket, TensorSpec
from megatron_rl.weights.transports import handles
from megatron_rl.weights.transports.group import UpdateGroup, address_towards, join_all
from megatron_rl.weights.transports.mail import Mail
from tests.parallel.policy_setup import make_config

SGLANG = {"kind": "sglang"}


def configured(engine: dict[str, Any], placement: str = "disaggregated") -> Config:
    return make_config("model", engine=engine, cluster={"placement": placement})


@pytest.mark.parametrize(
    ("engine", "placement", "on_devices", "expected"),
    [
        (SGLANG, "disaggregated", True, "broadcast"),
        (SGLANG, "colocated", True, "ipc"),
        (SGLANG, "disaggregated", False, "disk"),
        (SGLANG | {"dp": 2}, "disaggregated", True, "disk"),
        (SGLANG | {"stage_in_memory": True}, "disaggregated", True, "disk"),
        ({"kind": "embedded"}, "disaggregated", True, "disk"),  # that one computes on the CPU
        ({"kind": "embedded", "weight_transport": "broadcast"}, "disaggregated", False, "broadcast"),
        (SGLANG | {"weight_transport": "disk"}, "colocated", True, "disk"),
    ],
)
def test_what_auto_means(engine: dict[str, Any], placement: str, on_devices: bool, expected: str) -> None:
    assert choose_transport(configured(engine, placement), on_devices) == expected


def test_ranks_serve_the_engines_on_their_devices_in_order() -> None:
    assert partners_of(["a", "b"], tp=2, world_size=4, by_value=False) == {"a": [0, 1], "b": [2, 3]}


def test_by_value_engines_are_dealt_to_the_ranks() -> None:
    assert partners_of(["a", "b", "c"], tp=2, world_size=2, by_value=True) == {"a": [0, 0], "b": [1, 1], "c": [0, 0]}


def test_engines_without_a_rank_on_their_device_are_refused() -> None:
    with pytest.raises(EngineError, match=r"2 engines of engine\.tp=2 need as many trainer ranks.*there are 3"):
        partners_of(["a", "b"], tp=2, world_size=3, by_value=False)


# ------------------------------------------------------------------------------------------------------------ messages


def test_a_message_is_there_for_everybody_until_it_is_burnt() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    mine, theirs = Mail(store, "a"), Mail(store, "a")
    mine.post("1", {"url": "reason"})
    assert theirs.take("1", 1.0, "it") == theirs.take("1", 1.0, "it") == {"url": "reason"}
    mine.burn("1")
    with pytest.raises(WeightsError, match=r"waited 0 s for the weights of stage 0"):
        theirs.take("1", 0.01, "the weights of stage 0")


def test_messages_of_other_prefixes_are_others() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    Mail(store, "a").post("1", 1)
    with pytest.raises(WeightsError):
        Mail(store, "b").take("1", 0.01, "it")


# ----------------------------------------------------------------------------------------------------------- addresses


def test_an_engine_of_this_machine_reaches_us_over_the_loopback() -> None:
    assert address_towards(["http://127.0.0.1:30000"]) == "127.0.0.1"


def test_an_engine_whose_host_is_unknown_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(WeightsError, match=r"engine http://gone:1: no route to its host: .*not known"):
        address_towards(["http://gone:1"])


class Unanswered:
    """Engines that take every call and answer none."""

    done = False

    def __init__(self) -> None:
        self.asked: list[str] = []

    def post(self, path: str, bodies: Any, timeout_s: float) -> Unanswered:
        self.asked.append(path)
        return self

    def so_far(self) -> Replies:
        return Replies()

    def cancel(self) -> None:
        self.done = True


def test_a_group_whose_engine_cannot_be_found_fails_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    group = UpdateGroup(Unanswered(), ["http://gone:1", "http://b:1"], 1, "it", "gloo", 60.0)
    group.join()
    assert group.failed is not None
    assert group.failed.keys() == {"http://gone:1", "http://b:1"}
    assert "engine http://gone:1: no route to its host" in group.failed["http://gone:1"]


def test_meeting_in_a_group_is_given_up_when_the_run_is_to_end() -> None:
    engines = Unanswered()
    group = UpdateGroup(engines, ["http://127.0.0.1:1"], 1, "it", "gloo", 600.0, lambda: True)
    group.join()
    assert group.failed == {"http://127.0.0.1:1": "meeting in a process group: given up, the run is to end"}
    assert engines.done


def test_groups_meet_at_the_same_time() -> None:
    """Neither is answered, and both are given up as soon as both have been asked."""
    engines = [Unanswered(), Unanswered()]
    groups = [
        UpdateGroup(e, ["http://127.0.0.1:1"], 1, f"it-{i}", "gloo", 600.0, lambda: all(e.asked for e in engines))
        for i, e in enumerate(engines)
    ]
    join_all(groups)
    assert all(group.failed for group in groups)


# ------------------------------------------------------------------------------------------------------------- handles


def test_a_handle_carries_the_device_by_its_uuid_and_names_no_class_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch makes of a CUDA tensor is stood in for; that it can be opened needs a device."""
    words = ("tensor", "size", "stride", 0, "storage", torch.uint8, 3, b"handle", 64)
    rebuild = torch.multiprocessing.reductions.rebuild_cuda_tensor
    monkeypatch.setattr(handles.reductions, "reduce_tensor", lambda _: (rebuild, words))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: type("P", (), {"uuid": f"GPU-{number}"}))
    bucket = Bucket((TensorSpec("w", (2, 2), torch.bfloat16), TensorSpec("v", (4,), torch.bfloat16)))
    payload = base64.b64decode(handles.handle_payload(bucket, torch.zeros(32, dtype=torch.uint8)))
    found = Opened(payload).load()
    assert found["flattened_tensor"] == (*words[:6], "GPU-3", *words[7:])
    assert [entry.__dict__ for entry in found["metadata"]] == [
        {"name": "w", "shape": (2, 2), "dtype": torch.bfloat16, "start_idx": 0, "end_idx": 8, "numel": 8},
        {"name": "v", "shape": (4,), "dtype": torch.bfloat16, "start_idx": 8, "end_idx": 16, "numel": 8},
    ]


class Opened(pickle.Unpickler):
    """Takes what SGLang's unpickler takes of such a bucket, and no more."""

    def __init__(self, payload: bytes) -> None:
        super().__init__(io.BytesIO(payload))

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): lambda *words: words,
            ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): type("Metadata", (), {}),
            ("torch", "Size"): tuple,
            ("torch", "bfloat16"): torch.bfloat16,
            ("torch", "uint8"): torch.uint8,
        }
        return known[module, name]


def test_values_take_no_more_of_the_buffer_than_the_tensors() -> None:
    bucket = Bucket((TensorSpec("w", (4,), torch.float32),))
    flat = torch.zeros(100_000, dtype=torch.uint8)
    bucket.views(flat)["w"].copy_(torch.arange(4.0))
    payload = base64.b64decode(handles.value_payload(bucket, flat))
    assert len(payload) < 2_000
    [(name, tensor)] = pickle.loads(payload)
    assert name == "w"
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]
