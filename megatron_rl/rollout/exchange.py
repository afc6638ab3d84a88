"""One `/generate` request and its answer, over HTTP. Which replica is asked and what a failure means: `client.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import aiohttp

from megatron_rl.files import disk_failure

from .answers import parse_generations
from .protocol import (
    EngineBusy,
    EngineError,
    Generation,
    Prompt,
    ReplicaError,
    RequestLost,
    TransportError,
    generate_request,
)
from .routed import RouteFormat
from .session import error_text, open_session

ABORT_TIMEOUT_S = 5.0


class Exchange(Protocol):
    """Sends one request: from this process, or through one of several others (`workers`)."""

    async def generate(self, url: str, prompts: Sequence[Prompt]) -> list[Generation]:
        """Answers in the order of `prompts`; waits as long as it takes. Cancelling closes the connection.

        Raises:
            TransportError: the connection failed, or HTTP 502.
            EngineBusy: HTTP 429 or 503.
            ReplicaError: any other HTTP 5xx.
            ProtocolError, GenerationAborted: see `parse_generations`.
            RequestLost: the worker died, or the engine still has a request of this name.
            EngineError: the engine refused; its message is carried.
        """

    async def abort(self, url: str, rids: Sequence[str]) -> None:
        """Tell the engine to end these, id by id: SGLang ignores an id that no request has, even if it is the beginning
        of some. Silent if it cannot be reached.
        """


class HttpExchange:
    """From this process. Use as an async context manager.

    Args:
        vocab_size: token ids must be below it.
        api_key: bearer token of the engines, if they want one.
        routes: how routes of experts look, where some are to be kept.
    """

    def __init__(self, vocab_size: int, api_key: str | None = None, routes: RouteFormat | None = None) -> None:
        self._vocab_size, self._api_key, self._routes = vocab_size, api_key, routes
        self._store = None if routes is None else routes.store()

    async def __aenter__(self) -> HttpExchange:
        self._session = open_session(self._api_key)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def generate(self, url: str, prompts: Sequence[Prompt]) -> list[Generation]:
        """See `Exchange`."""
        answer = await self._post(url, generate_request(prompts))
        found = parse_generations(answer, prompts, url=url, vocab_size=self._vocab_size, routes=self._routes)
        if all(generation.rows is None for generation in found):
            return found
        try:
            return await asyncio.to_thread(self._keep, found, prompts)  # a file system may take its time
        except OSError as error:
            raise EngineError(f"routes of experts cannot be kept: {disk_failure(error) or error}") from error

    def _keep(self, found: list[Generation], prompts: Sequence[Prompt]) -> list[Generation]:
        """Write the routes, and put where they are in their place."""
        assert self._store is not None, "nobody asked for routes"
        for index, (generation, prompt) in enumerate(zip(found, prompts, strict=True)):
            if generation.rows is not None:
                part = self._store.append(generation.rows, prompt.routed, prompt.settings.routes or "")
                found[index] = generation._replace(rows=None, routes=part)
        return found

    async def _post(self, url: str, body: bytes) -> bytes:
        try:
            async with self._session.post(f"{url}/generate", data=body) as response:
                answer = await response.read()
        except aiohttp.ClientError as error:
            raise TransportError(f"engine {url}: /generate: {type(error).__name__}: {error}; is it running?") from error
        if response.status == 200:
            return answer
        text = error_text(answer)
        raise _kind(response.status, text)(f"engine {url}: /generate refused with HTTP {response.status}: {text}")

    async def abort(self, url: str, rids: Sequence[str]) -> None:
        """See `Exchange`."""
        with suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await asyncio.gather(*(self._abort_one(url, rid) for rid in rids))

    async def _abort_one(self, url: str, rid: str) -> None:
        async with self._session.post(f"{url}/abort_request", json={"rid": rid}) as response:
            await response.read()


def _kind(status: int, text: str) -> type[EngineError]:
    if status in (429, 503):
        return EngineBusy
    if status == 502:
        return TransportError
    if "Duplicate request ID" in text:
        return RequestLost  # one of an earlier process of ours, which the engine has not given up yet
    return ReplicaError if status >= 500 else EngineError
