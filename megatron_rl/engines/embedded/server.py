"""Routes of the embedded engine: paths, status codes and bodies of SGLang 0.5.23; what they do is in `service`."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_rl import __version__

from .gate import MemoryReleased, ShuttingDown
from .options import EmbeddedOptions
from .protocol import (
    AbortRequest,
    BadRequest,
    ContinueRequest,
    GenerateRequest,
    PauseRequest,
)
from .responses import error
from .service import EngineFailed, Service
from .weight_routes import add_weights
from .weight_service import WeightService

log = logging.getLogger(__name__)
HEALTH_TIMEOUT_S = 20.0
OPEN_PATHS = ("/health", "/ready")


def create_app(
    service: Service, weights: WeightService, options: EmbeddedOptions, model_info: dict[str, Any]
) -> FastAPI:
    """The application. `model_info` holds what /model_info says of the model beyond its path and version."""
    app = FastAPI(title="megatron_rl embedded engine", version=__version__, strict_content_type=False)
    if options.api_key is not None:
        app.add_middleware(_BearerToken, api_key=options.api_key)
    app.add_middleware(_ControlLog)
    _add_error_handlers(app)
    _add_generation(app, service)
    _add_control(app, service)
    add_weights(app, weights)
    _add_information(app, service, weights, options, model_info)
    return app


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def _add_error_handlers(app: FastAPI) -> None:
    async def invalid(_: Request, exception: Exception) -> Response:
        assert isinstance(exception, RequestValidationError | ValidationError)
        message = _explain(exception)
        # SGLang answers a body of the wrong form in the first style and a wrong value in the second: here in both.
        body = {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}
        return _json({**body, **error(message)}, 400)

    def answer_with(status: int) -> Any:
        async def handler(_: Request, exception: Exception) -> Response:
            return _json(error(str(exception) or "the server is shutting down"), status)

        return handler

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ValidationError, invalid)
    app.add_exception_handler(BadRequest, answer_with(400))
    app.add_exception_handler(MemoryReleased, answer_with(400))
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
    @app.api_route("/generate", methods=["POST", "PUT"])
    async def generate(request: Request) -> Response:
        # Parsed here, not by FastAPI: pydantic reads long token lists from the bytes several times faster.
        body = GenerateRequest.model_validate_json(await request.body())
        answer = await service.generate(body, request.receive)
        return Response(status_code=499) if answer is None else _json(answer)

    @app.post("/abort_request")
    async def abort_request(body: AbortRequest) -> Response:
        service.abort(body.rid, body.abort_all)
        return Response()


def _add_control(app: FastAPI, service: Service) -> None:
    @app.post("/pause_generation")
    async def pause_generation(body: PauseRequest = PauseRequest()) -> Response:  # noqa: B008 - frozen default
        await service.pause(body)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    @app.post("/continue_generation")
    async def continue_generation(body: ContinueRequest = ContinueRequest()) -> Response:  # noqa: B008
        await service.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache(timeout: Annotated[float, Query(ge=0.0)] = 0.0) -> Response:
        if await service.flush(timeout):
            return Response("Cache flushed.\n")
        return Response("Cache not flushed: requests are running or waiting.\n", 400)


def _add_information(
    app: FastAPI, service: Service, weights: WeightService, options: EmbeddedOptions, model: dict[str, Any]
) -> None:
    @app.get("/ready")
    async def ready() -> Response:
        return Response(status_code=503 if service.failed else 200)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if await _answers(service) else 503)

    @app.get("/health_generate")
    async def health_generate() -> Response:
        return Response(status_code=200 if await _generates(service) else 503)

    @app.get("/model_info")
    @app.get("/get_model_info", deprecated=True)
    async def model_info() -> Response:
        return _json({"model_path": weights.model_path, "weight_version": service.weight_version, **model})

    @app.get("/server_info")
    @app.get("/get_server_info", deprecated=True)
    async def server_info() -> Response:
        state = {"weight_version": service.weight_version, "paused": service.paused, **asdict(await service.load())}
        shown = {name: value for name, value in asdict(options).items() if name != "api_key"}
        place = {"model_path": weights.model_path, "context_length": service.limits.context_length}
        extra = {"engine": "embedded", "version": __version__, "status": "ready", "internal_states": [state]}
        return _json({**shown, **place, **extra})

    @app.get("/v1/loads")
    async def loads() -> Response:
        load = await service.load()
        total = options.max_running_requests * service.limits.context_length
        entry = {
            "dp_rank": 0,
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_used_tokens": load.cached_tokens,
            "num_total_tokens": load.cached_tokens,
            "max_total_num_tokens": total,
            "max_running_requests": options.max_running_requests,
            "token_usage": load.cached_tokens / total,
            "gen_throughput": load.tokens_per_second,
        }
        return _json({"timestamp": datetime.now(UTC).isoformat(), "version": __version__, "loads": [entry]})


async def _answers(service: Service) -> bool:
    """Whether the scheduler comes back between two steps."""
    try:
        await asyncio.wait_for(service.load(), HEALTH_TIMEOUT_S)
    except (TimeoutError, RuntimeError):
        return False
    return True


async def _generates(service: Service) -> bool:
    """Whether a token can be generated; an engine that holds back requests on purpose only has to answer."""
    if service.resting or not await _answers(service):
        return not service.failed and service.resting
    body = GenerateRequest.model_validate(
        {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    )
    try:
        await asyncio.wait_for(service.generate(body, asyncio.Event().wait), HEALTH_TIMEOUT_S)
    except (TimeoutError, EngineFailed, ShuttingDown):
        return False
    return True


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
        if scope["type"] == "http" and not scope["path"].startswith(OPEN_PATHS):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self._expected):
                await _json({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)
