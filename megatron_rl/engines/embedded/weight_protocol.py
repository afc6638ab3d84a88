"""What requests about weights and memory may say, in SGLang 0.5.23's field names and defaults."""

from __future__ import annotations

from typing import Literal

from .protocol import Body

Tag = Literal["kv_cache", "weights", "cuda_graph"]
Selector = Literal["target", "all"]
"""Which models are meant: there is no draft model here."""


class UpdateFromDiskRequest(Body):
    """Body of POST /update_weights_from_disk. `keep_pause` is accepted: as in SGLang, an update never ends a pause."""

    model_path: str
    load_format: Literal["auto", "safetensors"] | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True
    keep_pause: bool = False
    is_async: Literal[False] = False
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    manifest: None = None


class BeginUpdateRequest(Body):
    """Body of POST /begin_weight_update."""

    selector: Selector = "all"


class EndUpdateRequest(Body):
    """Body of POST /end_weight_update."""


class InitGroupRequest(Body):
    """Body of POST /init_weights_update_group: one receiver, so its rank is `rank_offset`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyGroupRequest(Body):
    """Body of POST /destroy_weights_update_group."""

    group_name: str = "weight_update_group"


class _UpdateRequest(Body):
    """What updates from memory have in common."""

    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: Literal["flattened_bucket"] | None = None
    selector: Selector = "all"
    torch_empty_cache: bool = False


class UpdateFromDistributedRequest(_UpdateRequest):
    """Body of POST /update_weights_from_distributed: what rank 0 of the group is about to broadcast, in order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"


class UpdateFromTensorRequest(_UpdateRequest):
    """Body of POST /update_weights_from_tensor: base64 of a pickle by value; see `wire_tensors.unpickle_tensors`."""

    serialized_named_tensors: list[str]


class UpdateVersionRequest(Body):
    """Body of POST /update_weight_version."""

    new_version: str
    abort_all_requests: bool = True


class MemoryRequest(Body):
    """Body of POST /release_memory_occupation and /resume_memory_occupation; no tags are all tags."""

    tags: list[Tag] | None = None


class CheckWeightsRequest(Body):
    """Body of POST /weights_checker."""

    action: str = "checksum"
    allow_quant_error: bool = False
    selector: Selector = "all"
    skip_tensor_list: list[str] | None = None
