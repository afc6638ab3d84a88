"""Routes of the embedded engine: paths, status codes and bodies of SGLang 0.5.23; what they do is in `service`."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_rl import __version__

from .gate import MemoryReleased, ShuttingDown
from .options import EmbeddedOptions
from .protocol import AbortRequest, BadRequest, GenerateRequest, PauseRequest
from .responses import answer, refusal
from .service import EngineFailed, Service
from .weight_routes import add_weights
from .weight_service import WeightService
from .weights import WeightsError

log = logging.getLogger(__name__)
HEALTH_TIMEOUT_S = 20.0
OPEN_PATHS = ("/health", "/ready")


def create_app(service: Service, weights: WeightService, options: EmbeddedOptions) -> FastAPI:
    """The application."""
    app = FastAPI(title="megatron_rl embedded engine", version=__version__, strict_content_type=False)
    if options.api_key is not None:
        app.add_middleware(_BearerToken, api_key=options.api_key)
    app.add_middleware(_ControlLog)
    _add_error_handlers(app)
    _add_generation(app, service)
    add_weights(app, weights)
    _add_information(app, service, weights, options)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    async def invalid(_: Request, exception: Exception) -> Response:
        assert isinstance(exception, RequestValidationError | ValidationError)
        return answer(refusal(_explain(exception)), 400)

    def answer_with(status: int) -> Any:
        async def handler(_: Request, exception: Exception) -> Response:
            return answer(refusal(str(exception) or "the server is shutting down"), status)

        return handler

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ValidationError, invalid)
    for refused in (BadRequest, WeightsError, MemoryReleased):
        app.add_exception_handler(refused, answer_with(400))
    app.add_exception_handler(EngineFailed, answer_with(500))
    app.add_exception_handler(ShuttingDown, answer_with(503))


def _explain(exception: RequestValidationError | ValidationError) -> str:
    """field: what is wrong, got value; at most three of them."""
    found = []
    for entry in exception.errors()[:3]:
        place = ".".join(str(part) for part in entry["loc"] if part != "body") or "body"
        found.append(f"{place}: {entry['msg']}, got {entry.get('input')!r:.80}")
    return "; ".join(found)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/generate")
    async def generate(request: Request) -> Response:
        # Parsed here, not by FastAPI: pydantic reads long token lists from the bytes several times faster.
        body = GenerateRequest.model_validate_json(await request.body())
        found = await service.generate(body, request.receive)
        return Response(status_code=499) if found is None else answer(found)

    @app.post("/abort_request")
    async def abort_request(body: AbortRequest) -> Response:
        service.abort(body.rid, body.abort_all)
        return Response()

    @app.post("/pause_generation")
    async def pause_generation(body: PauseRequest) -> Response:
        await service.pause(body)
        return answer({"message": "Generation paused successfully.", "status": "ok"})

    @app.post("/continue_generation")
    async def continue_generation() -> Response:
        await service.resume()
        return answer({"message": "Generation continued successfully.", "status": "ok"})

    @app.post("/flush_cache")
    async def flush_cache() -> Response:
        if await service.flush():
            return Response("Cache flushed.\n")
        return Response("Cache not flushed: requests are running or waiting.\n", 400)


def _add_information(app: FastAPI, service: Service, weights: WeightService, options: EmbeddedOptions) -> None:
    @app.get("/ready")
    async def ready() -> Response:
        return Response(status_code=503 if service.failed else 200)

    @app.get("/health")
    async def health() -> Response:
        try:
            await asyncio.wait_for(service.load(), HEALTH_TIMEOUT_S)
        except (TimeoutError, RuntimeError):
            return Response(status_code=503)
        return Response()

    @app.get("/model_info")
    async def model_info() -> Response:
        return answer({"model_path": weights.model_path, "weight_version": service.weight_version})

    @app.get("/server_info")
    async def server_info() -> Response:
        await service.load()  # so that it is the scheduler that answers, see `cluster.liveness`
        shown = {name: value for name, value in asdict(options).items() if name != "api_key"}
        return answer({**shown, "version": __version__})

    @app.get("/v1/loads")
    async def loads() -> Response:
        load = await service.load()
        entry = {
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_used_tokens": load.cached_tokens,
        }
        return answer({"loads": [entry]})


class _ControlLog:
    """One line for every call that changes something, when it arrives: the order in which the engine was told."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] != "/generate":
            log.info("POST %s", scope["path"])
        await self._app(scope, receive, send)


class _BearerToken:
    """Pure ASGI, so that a client's disconnect still reaches the routes."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._expected = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self._expected):
                await answer({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)
