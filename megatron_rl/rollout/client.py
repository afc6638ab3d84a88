"""The generation client: batched `/generate` requests to N replicas, with deadlines, bounded concurrency, few retries.

Only transport errors are retried (connection refused or reset, 502, 503); what an engine answers is final. Control
calls to all replicas are in `control.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import aiohttp
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    stop_all,
    wait_random_exponential,
)

from .protocol import (
    EngineError,
    Generation,
    Prompt,
    SamplingSettings,
    TransportError,
    generate_request,
    parse_generations,
    require_prompts,
)
from .router import Gate, Router
from .sample import group_of
from .session import error_text, open_session

log = logging.getLogger(__name__)
ABORT_TIMEOUT_S = 5.0


class EngineClient:
    """Sends groups to replicas. Use as an async context manager.

    Args:
        urls: base URLs of equal replicas.
        vocab_size: token ids must be below it.
        concurrency: sequences in flight at once, over all replicas.
        request_timeout_s: deadline of one request, its retries included.
        retries: further attempts after a transport error ...
        patience_s: ... and as many more as fit into this time: an engine may be restarting.
        api_key: bearer token of the engines, if they want one.
        logs: by URL, where an engine writes its log; messages say so.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        vocab_size: int,
        concurrency: int = 512,
        request_timeout_s: float = 600.0,
        retries: int = 3,
        patience_s: float = 0.0,
        api_key: str | None = None,
        logs: Mapping[str, Path] | None = None,
    ) -> None:
        self._router = Router([url.rstrip("/") for url in urls])
        self._gate = Gate(concurrency)
        self._vocab_size, self._timeout_s = vocab_size, request_timeout_s
        self._stop = stop_all(stop_after_attempt(retries + 1), stop_after_delay(patience_s))
        self._api_key, self._logs = api_key, logs or {}
        self._session: aiohttp.ClientSession | None = None
        self.transport_errors = 0

    async def __aenter__(self) -> EngineClient:
        self._session = open_session(self._api_key)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def urls(self) -> list[str]:
        """All replicas."""
        return self._router.urls

    async def generate(self, prompts: Sequence[Prompt], settings: SamplingSettings) -> list[Generation]:
        """One request for all `prompts`, whole groups; answers in their order. When cancelled, the engine is told.

        Raises:
            TransportError: still no connection after the last attempt.
            ProtocolError, GenerationAborted: see `parse_generations`.
            EngineError: the engine refused (its message is carried), the deadline passed, or see `require_prompts`.
        """
        require_prompts(prompts, self._vocab_size)
        group = group_of(prompts[0].rid)
        body = generate_request(prompts, settings)
        async with self._gate.hold(len(prompts)):
            try:
                async with asyncio.timeout(self._timeout_s):
                    url, answer = await self._send(prompts, body)
            except TimeoutError:
                where = self._router.home(group) or "(none reachable)"
                await self._abort(prompts)
                raise EngineError(
                    f"engine {where}: no answer to /generate for {group}* ({len(prompts)} sequences) within "
                    f"{self._timeout_s:g} s (rollout.request_timeout_s); look at {self._logs.get(where, 'its log')}, "
                    "or raise the deadline"
                ) from None
            except asyncio.CancelledError:
                await self._abort(prompts)
                raise
            finally:
                self._router.forget(group)
        return parse_generations(answer, prompts, settings, url=url, vocab_size=self._vocab_size)

    async def _send(self, prompts: Sequence[Prompt], body: bytes) -> tuple[str, bytes]:
        group = group_of(prompts[0].rid)
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(TransportError),
            stop=self._stop,
            wait=wait_random_exponential(multiplier=0.1, max=2.0),
            before_sleep=_log_retry,
            reraise=True,
        )
        async for attempt in attempts:
            with attempt, self._router.route(group, len(prompts)) as url:
                try:
                    return url, await self._post(url, body)
                except TransportError:
                    self.transport_errors += 1
                    await self._abort(prompts)  # what the broken connection left running must not meet its successor
                    self._router.failed(group, url)
                    raise
        raise AssertionError("unreachable: the last attempt raises")

    async def _post(self, url: str, body: bytes) -> bytes:
        assert self._session is not None, "EngineClient is used outside `async with`"
        try:
            headers = {"Content-Type": "application/json"}
            async with self._session.post(f"{url}/generate", data=body, headers=headers) as response:
                answer = await response.read()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise TransportError(f"engine {url}: /generate: {type(error).__name__}: {error}; is it running?") from error
        if response.status in (502, 503):
            raise TransportError(f"engine {url}: /generate: HTTP {response.status}: {error_text(answer)}")
        if response.status != 200:
            raise EngineError(f"engine {url}: /generate refused with HTTP {response.status}: {error_text(answer)}")
        return answer

    async def _abort(self, prompts: Sequence[Prompt]) -> None:
        """Abort these at the replica that has them, id by id: SGLang ignores an id that no request has, even if it is
        the beginning of some. Silent if it cannot be reached.
        """
        url = self._router.home(group_of(prompts[0].rid))
        if url is None:
            return
        with suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await asyncio.gather(*(self._abort_one(url, prompt.rid) for prompt in prompts))

    async def _abort_one(self, url: str, rid: str) -> None:
        assert self._session is not None
        async with self._session.post(f"{url}/abort_request", json={"rid": rid}) as response:
            await response.read()


def _log_retry(state: RetryCallState) -> None:
    if state.attempt_number & (state.attempt_number - 1):
        return  # an engine that restarts is tried again many times: said for the attempts 1, 2, 4, 8, ...
    log.warning("%s; attempt %d follows", state.outcome and state.outcome.exception(), state.attempt_number + 1)
