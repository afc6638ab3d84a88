"""Routes about weights and memory: paths, statuses and bodies of SGLang 0.5.23; what they do is in `weight_service`."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.responses import Response

from .responses import checksum, error
from .weight_protocol import (
    BeginUpdateRequest,
    CheckWeightsRequest,
    DestroyGroupRequest,
    EndUpdateRequest,
    InitGroupRequest,
    MemoryRequest,
    UpdateFromDiskRequest,
    UpdateFromDistributedRequest,
    UpdateFromTensorRequest,
    UpdateVersionRequest,
)
from .weight_service import WeightService
from .weights import WeightsError


def add_weights(app: FastAPI, weights: WeightService) -> None:
    """Every route that reads or changes weights or memory."""
    _add_updates(app, weights)
    _add_groups(app, weights)
    _add_memory(app, weights)


async def _outcome(action: Awaitable[str | None], **extra: Any) -> Response:
    """Success with the action's message, or status 400 with the reason why it was refused."""
    try:
        content = {"success": True, "message": await action or "Success", **extra}
    except WeightsError as failure:
        return _json({"success": False, "message": str(failure), **extra}, 400)
    return _json(content)


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def _add_updates(app: FastAPI, weights: WeightService) -> None:
    @app.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: UpdateFromDiskRequest) -> Response:
        return await _outcome(weights.from_disk(body), num_paused_requests=0)

    @app.post("/begin_weight_update")
    async def begin_weight_update(body: BeginUpdateRequest) -> Response:
        return await _outcome(weights.begin())

    @app.post("/end_weight_update")
    async def end_weight_update(body: EndUpdateRequest) -> Response:
        return await _outcome(weights.end())

    @app.post("/update_weights_from_distributed")
    async def update_weights_from_distributed(body: UpdateFromDistributedRequest) -> Response:
        return await _outcome(weights.from_distributed(body))

    @app.post("/update_weights_from_tensor")
    async def update_weights_from_tensor(body: UpdateFromTensorRequest) -> Response:
        return await _outcome(weights.from_tensor(body))

    @app.post("/update_weight_version")
    async def update_weight_version(body: UpdateVersionRequest) -> Response:
        await weights.rename(body.new_version, body.abort_all_requests)
        message = f"Weight version updated to {body.new_version}"
        return _json({"success": True, "message": message, "new_version": body.new_version})

    @app.api_route("/weights_checker", methods=["GET", "POST"])
    async def weights_checker(body: CheckWeightsRequest = CheckWeightsRequest()) -> Response:  # noqa: B008
        if body.action != "checksum":
            message = f"action {body.action!r}: the embedded engine knows only 'checksum'"
            return _json({"success": False, "message": message}, 400)
        skip = body.skip_tensor_list or ()
        try:
            sums = await weights.checksums()
        except WeightsError as failure:
            return _json({"success": False, "message": str(failure)}, 400)
        return _json(checksum({name: value for name, value in sums.items() if not any(part in name for part in skip)}))


def _add_groups(app: FastAPI, weights: WeightService) -> None:
    @app.post("/init_weights_update_group")
    async def init_weights_update_group(body: InitGroupRequest) -> Response:
        return await _outcome(weights.join(body))

    @app.post("/destroy_weights_update_group")
    async def destroy_weights_update_group(body: DestroyGroupRequest) -> Response:
        return await _outcome(weights.leave(body.group_name))


def _add_memory(app: FastAPI, weights: WeightService) -> None:
    @app.api_route("/release_memory_occupation", methods=["GET", "POST"])
    async def release_memory_occupation(body: MemoryRequest = MemoryRequest()) -> Response:  # noqa: B008
        try:
            await weights.release(body)
        except WeightsError as failure:
            return _json(error(str(failure)), 400)
        return _json(None)

    @app.api_route("/resume_memory_occupation", methods=["GET", "POST"])
    async def resume_memory_occupation(body: MemoryRequest = MemoryRequest()) -> Response:  # noqa: B008
        try:
            weights.resume(body)
        except WeightsError as failure:
            return _json(error(str(failure)), 400)
        return _json(None)
