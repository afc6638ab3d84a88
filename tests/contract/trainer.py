"""The trainer's side of weight updates in the plainest form, for the contract tests; holds no tests."""

from __future__ import annotations

import base64
import itertools
import pickle
import sys
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d

from megatron_rl.addresses import free_port
from megatron_rl.weights.transports.group import in_thread
from tests.contract.servers import Answer, Server

NamedTensors = list[tuple[str, torch.Tensor]]
TIMEOUT_S = 60.0
_numbers = itertools.count()


def tensors_of(model: Path) -> NamedTensors:
    """All parameters of a model directory, by their names in the checkpoint."""
    return list(load_file(model / "model.safetensors").items())


@contextmanager
def session(server: Server) -> Iterator[None]:
    """A weight-update session."""
    server.ok("/begin_weight_update", {})
    try:
        yield
    finally:
        server.ok("/end_weight_update", {})


@dataclass
class Sender:
    """Rank 0 of a process group with one server."""

    server: Server
    name: str
    group: Any

    def send(self, tensors: NamedTensors) -> Answer:
        """Announce, broadcast, and what the server answered."""
        answer = self.announce(tensors)
        dist.broadcast(flat(tensors), src=0, group=self.group)
        return answer.result(TIMEOUT_S)

    def announce(self, tensors: NamedTensors) -> Future[Answer]:
        """Tell the server what would be broadcast."""
        body = {**description(tensors), "group_name": self.name}
        return in_thread(lambda: self.server.call("/update_weights_from_distributed", body))

    def close(self) -> None:
        """Close the connections, as the end of a process does."""
        dist.destroy_process_group(self.group)
        self.group = None


@contextmanager
def sender(server: Server) -> Iterator[Sender]:
    """A process group with the server."""
    found = join(server)
    yield found
    gone = server.call("/destroy_weights_update_group", {"group_name": found.name})
    assert gone.status == 200, gone
    if found.group is not None:
        found.close()


def join(server: Server) -> Sender:
    """Meet the server in a process group, with torch's own function, as SGLang does on its side."""
    name, port = f"group-{next(_numbers)}", free_port()
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    body |= {"group_name": name, "backend": "gloo"}
    answer = in_thread(lambda: server.call("/init_weights_update_group", body))
    found = Sender(server, name, _rank_0(name, port))
    assert answer.result(TIMEOUT_S) == Answer(
        200, {"success": True, "message": "Succeeded to initialize custom process group."}
    )
    return found


def _rank_0(name: str, port: int) -> Any:
    timeout = timedelta(seconds=TIMEOUT_S)
    store, _, _ = next(iter(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timeout)))
    group, _ = c10d._new_process_group_helper(
        2, 0, [], dist.Backend("gloo"), c10d.PrefixStore(name, store), group_name=name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


def description(tensors: NamedTensors) -> dict[str, Any]:
    """What is announced of tensors that are broadcast together."""
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors]
    return {
        "names": [name for name, _ in tensors],
        "dtypes": dtypes,
        "shapes": [list(tensor.shape) for _, tensor in tensors],
        "load_format": "flattened_bucket",
        "flush_cache": False,
    }


def flat(tensors: NamedTensors) -> torch.Tensor:
    """All bytes, uint8 [bytes]."""
    return torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in tensors])


def payload(tensors: NamedTensors, flattened: bool = False) -> str:
    """The text for /update_weights_from_tensor."""
    return encode({"flattened_tensor": flat(tensors), "metadata": _metadata(tensors)} if flattened else tensors)


def encode(content: Any) -> str:
    """base64(pickle(content)); bucket entries are pickled under the name of SGLang's class."""
    name = "sglang.srt.weight_sync.tensor_bucket"
    parts = name.split(".")
    modules = {".".join(parts[: i + 1]): types.ModuleType(parts[i]) for i in range(len(parts))}
    modules[name].FlattenedTensorMetadata = FlattenedTensorMetadata  # type: ignore[attr-defined]
    assert not set(modules) & set(sys.modules)
    sys.modules.update(modules)
    try:
        return base64.b64encode(pickle.dumps(content)).decode()
    finally:
        for module in modules:
            del sys.modules[module]


@dataclass
class FlattenedTensorMetadata:
    """Looks like SGLang's to pickle."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


FlattenedTensorMetadata.__module__ = "sglang.srt.weight_sync.tensor_bucket"


def _metadata(tensors: NamedTensors) -> list[FlattenedTensorMetadata]:
    found: list[FlattenedTensorMetadata] = []
    for name, tensor in tensors:
        start = found[-1].end_idx if found else 0
        size = tensor.nbytes
        found.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, start + size, size))
    return found


def split(tensors: NamedTensors, count: int) -> Sequence[NamedTensors]:
    """`count` buckets that hold neighbours of the network in different ones, the last tensors first."""
    backwards = tensors[::-1]
    return [backwards[i::count] for i in range(count)]
