"""What requests about weights and memory may say, in SGLang 0.5.23's field names: what a run sends, nothing else."""

from __future__ import annotations

from typing import Literal

from .protocol import Body


class UpdateFromDiskRequest(Body):
    """Body of POST /update_weights_from_disk."""

    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: Literal[False] = False


class BeginUpdateRequest(Body):
    """Body of POST /begin_weight_update; there is no draft model here that could be meant."""

    selector: Literal["all"] = "all"


class InitGroupRequest(Body):
    """Body of POST /init_weights_update_group: one receiver, so its rank is `rank_offset`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


class DestroyGroupRequest(Body):
    """Body of POST /destroy_weights_update_group."""

    group_name: str


class _UpdateRequest(Body):
    """What updates from memory have in common: `/update_weight_version` and `/flush_cache` follow the last of them."""

    flush_cache: Literal[False]
    abort_all_requests: Literal[False] = False


class UpdateFromDistributedRequest(_UpdateRequest):
    """Body of POST /update_weights_from_distributed: what rank 0 of the group is about to broadcast, in order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    load_format: Literal["flattened_bucket"]


class UpdateFromTensorRequest(_UpdateRequest):
    """Body of POST /update_weights_from_tensor: base64 of a pickle by value; see `wire_tensors.unpickle_tensors`."""

    serialized_named_tensors: list[str]
    load_format: Literal["flattened_bucket"] | None = None


class UpdateVersionRequest(Body):
    """Body of POST /update_weight_version."""

    new_version: str
    abort_all_requests: Literal[False]


class MemoryRequest(Body):
    """Body of POST /release_memory_occupation and /resume_memory_occupation."""

    tags: frozenset[Literal["kv_cache", "weights"]]


class CheckWeightsRequest(Body):
    """Body of POST /weights_checker."""

    action: Literal["checksum"]
