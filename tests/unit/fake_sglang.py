"""A server that answers wrongly on purpose: failures that no real engine can be made to show.

Anything a real engine does is tested with a real engine. Holds no tests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

from aiohttp import web

Body = dict[str, Any]
Answer = Callable[[Body], Awaitable[web.StreamResponse]]
META = "meta_info"


def good_answer(rid: str, tokens: list[int], version: str = "0") -> Body:
    """What SGLang says of one finished sequence."""
    return {
        "text": "",
        "output_ids": tokens,
        "meta_info": {
            "id": rid,
            "finish_reason": {"type": "stop", "matched": 2},
            "prompt_tokens": 1,
            "completion_tokens": len(tokens),
            "weight_version": version,
            "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
            "output_token_logprobs": [[-0.5, t, None] for t in tokens],
        },
    }


def good_batch(body: Body) -> list[Body]:
    return [good_answer(rid, [5, 2]) for rid in body["rid"]]


class FakeEngine:
    """Listens on a free loopback port while the `async with` block runs.

    `answers` are used up one per /generate; after them comes `always`, a good answer unless it is set. `control` maps a
    path to the (status, body) of its answer; others succeed. `requests` records (path, body) of all that came. The
    answer to a path in `held` is sent when the event is set, as it was when the request came.
    """

    def __init__(self, *answers: Answer, control: dict[str, tuple[int, Any]] | None = None, port: int = 0) -> None:
        self._answers, self._port = list(answers), port
        self._control = {} if control is None else control
        self.held: dict[str, asyncio.Event] = {}
        self.requests: list[tuple[str, Body]] = []
        self.loaded = "default"
        self.closing = asyncio.Event()
        self.always: Answer = changed(lambda _: None)

    async def __aenter__(self) -> FakeEngine:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        await self._runner.cleanup()

    def recover(self) -> None:
        """From now on every control call succeeds."""
        self._control = {}

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read() or b"{}")
        self.requests.append((request.path, body))
        if request.path in self._control:
            status, answer = self._control[request.path]
            if request.path in self.held:
                await self.held[request.path].wait()
            return web.json_response(answer, status=status)
        if request.path == "/generate":
            try:
                return await (self._answers.pop(0) if self._answers else self.always)(body)
            except ConnectionResetError:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
        return web.json_response(self._succeed(request.path, body))

    def _succeed(self, path: str, body: Body) -> Any:
        if path == "/update_weights_from_disk":
            self.loaded = body["weight_version"]
        if path == "/model_info":
            return {"weight_version": self.loaded}
        if path == "/weights_checker":
            return {"success": True, "message": "", "ranks": [{"checksums": {"w": "1", "v": "2"}}]}
        return {"success": True, "message": "", "status": "ok"}

    # ---- answers to give

    def hang(self) -> Answer:
        return hangs_until(self.closing)


def hangs_until(event: asyncio.Event) -> Answer:
    async def answer(_: Body) -> web.StreamResponse:
        await event.wait()
        return web.Response()

    return answer


def says(status: int, body: Any = None) -> Answer:
    async def answer(_: Body) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return answer


def says_text(text: str) -> Answer:
    async def answer(_: Body) -> web.StreamResponse:
        return web.Response(text=text, content_type="application/json")

    return answer


def changed(change: Callable[[Body], None]) -> Answer:
    """A good answer whose last sequence was changed."""

    async def answer(body: Body) -> web.StreamResponse:
        batch = good_batch(body)
        change(batch[-1])
        return web.json_response(batch)

    return answer


def resets() -> Answer:
    """Closes the connection in the middle of the answer."""

    async def answer(_: Body) -> web.StreamResponse:
        raise ConnectionResetError

    return answer


def drop(*path: str) -> Callable[[Body], None]:
    def change(answer: Body) -> None:
        for name in path[:-1]:
            answer = answer[name]
        del answer[path[-1]]

    return change


def put(value: Any, *path: str) -> Callable[[Body], None]:
    def change(answer: Body) -> None:
        for name in path[:-1]:
            answer = answer[name]
        answer[path[-1]] = value

    return change
