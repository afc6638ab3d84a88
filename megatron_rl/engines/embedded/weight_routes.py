"""Routes about weights and memory: paths and bodies of SGLang 0.5.23; what they do is in `weight_service`.

WeightsError, which any of them may raise, is answered by `server`.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from .responses import answer, checksum
from .weight_protocol import (
    BeginUpdateRequest,
    CheckWeightsRequest,
    DestroyGroupRequest,
    InitGroupRequest,
    MemoryRequest,
    UpdateFromDiskRequest,
    UpdateFromDistributedRequest,
    UpdateFromTensorRequest,
    UpdateVersionRequest,
)
from .weight_service import WeightService


def add_weights(app: FastAPI, weights: WeightService) -> None:
    """Every route that reads or changes weights or memory."""
    _add_updates(app, weights)
    _add_groups(app, weights)
    _add_memory(app, weights)


def _success(message: str = "Success", **extra: Any) -> Response:
    return answer({"success": True, "message": message, **extra})


def _add_updates(app: FastAPI, weights: WeightService) -> None:
    @app.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: UpdateFromDiskRequest) -> Response:
        return _success(await weights.from_disk(body))

    @app.post("/begin_weight_update")
    async def begin_weight_update(body: BeginUpdateRequest) -> Response:
        await weights.begin()
        return _success()

    @app.post("/end_weight_update")
    async def end_weight_update() -> Response:
        await weights.end()
        return _success()

    @app.post("/update_weights_from_distributed")
    async def update_weights_from_distributed(body: UpdateFromDistributedRequest) -> Response:
        await weights.from_distributed(body)
        return _success("Succeeded to update parameter online.")

    @app.post("/update_weights_from_tensor")
    async def update_weights_from_tensor(body: UpdateFromTensorRequest) -> Response:
        await weights.from_tensor(body)
        return _success()

    @app.post("/update_weight_version")
    async def update_weight_version(body: UpdateVersionRequest) -> Response:
        await weights.rename(body.new_version)
        return _success(f"Weight version updated to {body.new_version}", new_version=body.new_version)

    @app.post("/weights_checker")
    async def weights_checker(body: CheckWeightsRequest) -> Response:
        return answer(checksum(await weights.checksums()))


def _add_groups(app: FastAPI, weights: WeightService) -> None:
    @app.post("/init_weights_update_group")
    async def init_weights_update_group(body: InitGroupRequest) -> Response:
        await weights.join(body)
        return _success("Succeeded to initialize custom process group.")

    @app.post("/destroy_weights_update_group")
    async def destroy_weights_update_group(body: DestroyGroupRequest) -> Response:
        await weights.leave(body.group_name)
        return _success("Succeeded to destroy custom process group.")


def _add_memory(app: FastAPI, weights: WeightService) -> None:
    @app.post("/release_memory_occupation")
    async def release_memory_occupation(body: MemoryRequest) -> Response:
        await weights.release(body.tags)
        return answer(None)

    @app.post("/resume_memory_occupation")
    async def resume_memory_occupation(body: MemoryRequest) -> Response:
        weights.resume(body.tags)
        return answer(None)
