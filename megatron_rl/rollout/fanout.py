"""One call to many engine replicas at once, with an answer or an error for each; which calls make sense is elsewhere.

Calls run in a thread of their own with one event loop, so that a caller can start one and do something else meanwhile
(send the weights that the engines were told to expect), and so that connections are kept between calls.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from .protocol import EngineError, TransportError
from .session import error_text, open_session

POLL_S = 0.2


class Interrupted(EngineError):
    """The run is to end; what the engines hold is none of its concern any more."""


@dataclass(frozen=True)
class Replies:
    """What each replica said: JSON (None when empty, text when it is none) or why there is no answer."""

    answers: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, EngineError] = field(default_factory=dict)

    def require_all(self, what: str) -> dict[str, Any]:
        """The answers by URL. Raises EngineError naming every replica that failed."""
        if self.failures:
            unreachable = any(isinstance(error, TransportError) for error in self.failures.values())
            kind = TransportError if unreachable else EngineError
            raise kind(f"{what} failed: " + "; ".join(map(str, self.failures.values())))
        return self.answers


class Pending:
    """A call on its way."""

    def __init__(self, futures: dict[str, Future[Any]]) -> None:
        self._futures = futures

    def so_far(self) -> Replies:
        """Those that have answered or failed by now."""
        replies = Replies()
        for url, future in self._futures.items():
            if future.done():
                self._sort(url, future, replies)
        return replies

    @property
    def done(self) -> bool:
        """Whether all have answered or failed."""
        return all(future.done() for future in self._futures.values())

    def result(self, interrupted: Callable[[], bool] = lambda: False) -> Replies:
        """Wait for all; each has its own deadline.

        Raises:
            Interrupted: `interrupted()` came first; what is on its way is given up.
        """
        if self._ends_before(interrupted):
            return self.so_far()
        self.cancel()
        raise Interrupted("interrupted: the run is to end")

    def result_unless(self, give_up: Callable[[], bool]) -> Replies:
        """Wait for all; those that have not answered when `give_up()` have failed. Never raises for a replica."""
        if not self._ends_before(give_up):
            self.cancel()
        return self.so_far()

    def result_within(self, seconds: float, interrupted: Callable[[], bool]) -> Replies:
        """What has come after so long; the rest stays on its way. Raises Interrupted as `result`."""
        deadline = time.monotonic() + seconds
        if not self._ends_before(lambda: interrupted() or time.monotonic() >= deadline) and interrupted():
            return self.result(interrupted)
        return self.so_far()

    def _ends_before(self, give_up: Callable[[], bool]) -> bool:
        while wait(self._futures.values(), POLL_S).not_done:
            if give_up():
                return False
        return True

    def cancel(self) -> None:
        """Close the connections that are still waiting."""
        for future in self._futures.values():
            future.cancel()

    @staticmethod
    def _sort(url: str, future: Future[Any], replies: Replies) -> None:
        if future.cancelled():
            replies.failures[url] = TransportError(f"engine {url}: given up")
        elif (error := future.exception()) is None:
            replies.answers[url] = future.result()
        elif isinstance(error, EngineError):
            replies.failures[url] = error
        else:
            raise error


class FanOut:
    """HTTP to replicas; every call has a deadline. Blocking code may use it from any thread.

    Args:
        api_key: bearer token of the engines, if they want one.
        logs: by URL, where an engine writes its log; messages say so.
    """

    def __init__(self, *, api_key: str | None = None, logs: Mapping[str, Path] | None = None) -> None:
        self._api_key, self._logs = api_key, logs or {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None

    def post(self, path: str, bodies: Mapping[str, Any], timeout_s: float) -> Pending:
        """Start POST `path` with the JSON body of each URL in `bodies`; bytes are JSON already."""
        return self._start("POST", path, bodies, timeout_s)

    def get(self, path: str, urls: Sequence[str], timeout_s: float) -> Pending:
        """Start GET `path` at all `urls`."""
        return self._start("GET", path, dict.fromkeys(urls), timeout_s)

    def close(self) -> None:
        """End the thread and its connections."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(), loop).result()
            loop.call_soon_threadsafe(loop.stop)

    def _start(self, method: str, path: str, bodies: Mapping[str, Any], timeout_s: float) -> Pending:
        loop = self._running_loop()
        return Pending(
            {
                url: asyncio.run_coroutine_threadsafe(self._request(method, url, path, body, timeout_s), loop)
                for url, body in bodies.items()
            }
        )

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), name="engine calls", daemon=True).start()
            return self._loop

    async def _request(self, method: str, url: str, path: str, body: Any, timeout_s: float) -> Any:
        if self._session is None:
            self._session = open_session(self._api_key)
        try:
            async with asyncio.timeout(timeout_s):
                data = body if body is None or isinstance(body, bytes) else orjson.dumps(body)
                headers = {} if data is None else {"Content-Type": "application/json"}
                async with self._session.request(method, url + path, data=data, headers=headers) as response:
                    return _read(url, response.status, await response.read())
        except TimeoutError:
            log = f"; look at {self._logs[url]}" if url in self._logs else ""
            raise TransportError(f"engine {url}: no answer to {path} within {timeout_s:.3g} s{log}") from None
        except aiohttp.ClientError as error:
            raise TransportError(f"engine {url}: {type(error).__name__}: {error}; is it running?") from error

    async def _end(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _read(url: str, status: int, answer: bytes) -> Any:
    if status in (502, 503):
        raise TransportError(f"engine {url}: HTTP {status}: {error_text(answer)}")
    if status != 200:
        raise EngineError(f"engine {url}: HTTP {status}: {error_text(answer)}")
    try:
        value = orjson.loads(answer) if answer else None
    except orjson.JSONDecodeError:
        value = answer.decode(errors="replace")
    if isinstance(value, dict) and value.get("success") is False:
        raise EngineError(f"engine {url}: {value.get('message')}")
    return value
