"""The controller's routes: JSON and safetensors over aiohttp, a bearer token on every one. Nothing is decided here."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web
from pydantic import ValidationError

from megatron_rl.data import DataError

from .evaluation import EvalRequest
from .progress import StepConflict
from .wire import RolloutShard

if TYPE_CHECKING:
    from .controller import Controller

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_BODY = 2**40
"""A restored state may be large; the token is what keeps strangers out."""


def build_app(controller: Controller, token: str) -> web.Application:
    """All routes of `controller`."""
    routes = _Routes(controller)
    app = web.Application(client_max_size=MAX_BODY, middlewares=[_errors, _bearer(token)])
    app.add_routes(
        [
            web.get("/v1/ping", routes.ping),
            web.post("/v1/weights", routes.weights),
            web.get(r"/v1/update/{version:\d+}", routes.update),
            web.get(r"/v1/step/{step:\d+}", routes.status),
            web.get(r"/v1/step/{step:\d+}/table", routes.table),
            web.post(r"/v1/step/{step:\d+}/samples", routes.samples),
            web.post(r"/v1/step/{step:\d+}/done", routes.done),
            web.post("/v1/eval", routes.evaluate),
            web.get("/v1/eval/{id}", routes.evaluation),
            web.get("/v1/state", routes.state),
            web.post("/v1/state", routes.restore),
        ]
    )
    return app


def _bearer(token: str) -> Any:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, expected):
            return _json({"error": {"message": "wrong or missing bearer token"}}, 401)
        return await handler(request)

    return check


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """409: does not fit the step; 400: malformed; 500: a fault of ours, with its traceback in the log."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _json({"error": {"message": f"{request.method} {request.path}: {error.reason}"}}, error.status)
    except StepConflict as error:
        return _json({"error": {"message": str(error)}}, 409)
    except (ValidationError, DataError, ValueError) as error:
        log.warning("%s %s refused: %r", request.method, request.path, error)
        return _json({"error": {"message": f"{request.method} {request.path}: {error}"}}, 400)
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return _json({"error": {"message": f"{request.method} {request.path}: {error!r}"}}, 500)


class _Routes:
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def ping(self, _: web.Request) -> web.Response:
        return _json({"step": self._controller.scheduler.progress.step, "ledger": self._controller.ledger})

    async def weights(self, request: web.Request) -> web.Response:
        self._controller.publish(**await _body(request))
        return _json({})

    async def update(self, request: web.Request) -> web.Response:
        return _json(self._controller.update_status(int(request.match_info["version"])))

    async def status(self, request: web.Request) -> web.Response:
        return _json(self._controller.step_status(_step(request)))

    async def table(self, request: web.Request) -> web.Response:
        return _binary(self._controller.table(_step(request)).to_bytes())

    async def samples(self, request: web.Request) -> web.Response:
        samples = self._controller.samples(_step(request), (await _body(request))["indices"])
        return _binary(RolloutShard.of(samples).to_bytes())

    async def done(self, request: web.Request) -> web.Response:
        await self._controller.done(_step(request), (await _body(request)).get("gaps"))
        return _json({})

    async def evaluate(self, request: web.Request) -> web.Response:
        job = self._controller.evaluator.submit(EvalRequest.model_validate(await _body(request)))
        return _json({"id": job.id})

    async def evaluation(self, request: web.Request) -> web.Response:
        job = self._controller.evaluator.jobs.get(request.match_info["id"])
        if job is None:
            raise web.HTTPNotFound(reason=f"no evaluation {request.match_info['id']!r}")
        engines = self._controller.engines
        return _json({"status": job.status, "message": job.message, "metrics": job.metrics, "engines": engines})

    async def state(self, _: web.Request) -> web.Response:
        return _binary(await self._controller.save_state())

    async def restore(self, request: web.Request) -> web.Response:
        self._controller.restore_state(await request.read())
        return _json({"step": self._controller.scheduler.progress.step})


def _step(request: web.Request) -> int:
    return int(request.match_info["step"])


async def _body(request: web.Request) -> dict[str, Any]:
    return dict(orjson.loads(await request.read()))


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _binary(blob: bytes) -> web.Response:
    return web.Response(body=blob, content_type="application/octet-stream")
