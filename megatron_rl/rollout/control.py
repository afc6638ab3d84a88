"""Control calls to all engine replicas at once, and the weight update built from them. Generation is in `client.py`.

`EngineControl` is plain blocking code for the trainer's rank 0; each call runs its own short event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import orjson

from .protocol import EngineError, TransportError, parse_version
from .session import error_text, open_session

T = TypeVar("T")
log = logging.getLogger(__name__)
FLUSH_ATTEMPTS, FLUSH_PAUSE_S = 50, 0.1
POLL_S = 0.2


class EngineControl:
    """Talks to every replica directly (routers do not forward control calls). A call succeeds when all replicas did.

    Args:
        urls: base URLs of all replicas.
        timeout_s: deadline of one call to this class, over all replicas and steps.
        patience_s: how long a weight update waits for a replica that cannot be reached: it may be restarting.
        api_key: bearer token of the engines, if they want one.
        logs: by URL, where an engine writes its log; messages say so.

    Raises (all methods):
        EngineError: naming every engine that failed, the step, and what it said.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float = 600.0,
        patience_s: float = 0.0,
        api_key: str | None = None,
        logs: Mapping[str, Path] | None = None,
    ) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self._timeout_s, self._patience_s, self._api_key = timeout_s, patience_s, api_key
        self._logs = logs or {}

    def update_from_disk(
        self, path: str | Path, version: int, interrupted: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Load the weights at `path` (a Hugging Face directory that the engines can read) as `version` everywhere.

        pause(retract) -> flush_cache -> update_weights_from_disk -> checksums equal -> continue -> /model_info says so.
        After a failure the engines stay paused: what they hold is not known. Given up as soon as `interrupted()`.

        Returns:
            The checksum over all parameters of one engine, where engines report it.
        """
        try:
            return self._run(
                f"weight update to version {version} from {path}",
                lambda calls: _unless(interrupted, calls, _update_all(calls, str(path), version, self._patience_s)),
            )
        except EngineError as error:
            raise EngineError(
                f"{error}; the engines stay paused until an update succeeds or they are restarted"
            ) from error

    def wait_ready(self) -> None:
        """Block until every replica answers /ready."""
        self._run("waiting for engines", _wait_ready)

    def model_info(self) -> dict[str, Any]:
        """`/model_info` of each replica, by URL."""
        return self._run("model_info", lambda calls: calls.get("/model_info"))

    def checksums(self) -> dict[str, list[dict[str, str]]]:
        """Per replica and tensor-parallel rank: parameter name -> checksum."""
        return self._run("checksums", _checksums)

    def pause(self, mode: str = "retract") -> None:
        """Stop decoding; `retract` keeps requests waiting, `abort` ends them, `in_place` keeps their cache."""
        self._run(f"pause ({mode})", lambda calls: calls.post("/pause_generation", {"mode": mode}))

    def resume(self) -> None:
        """Decode again."""
        self._run("continue", lambda calls: calls.post("/continue_generation", {}))

    def abort_all(self) -> None:
        """End all requests."""
        self._run("abort", lambda calls: calls.post("/abort_request", {"abort_all": True}))

    def flush_cache(self) -> None:
        """Empty the prefix caches; retried for a few seconds while requests still leave."""
        self._run("flush_cache", _flush)

    def _run(self, what: str, action: Callable[[_Calls], Awaitable[T]]) -> T:
        return asyncio.run(self._session(what, action))

    async def _session(self, what: str, action: Callable[[_Calls], Awaitable[T]]) -> T:
        async with open_session(self._api_key) as session:
            calls = _Calls(session, self.urls, what)
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await action(calls)
            except TimeoutError:
                late = sorted(calls.waiting)
                logs = [str(self._logs[url]) for url in late if url in self._logs]
                raise EngineError(
                    f"{what}: step {calls.step}: not finished within {self._timeout_s:g} s; waiting for "
                    f"{', '.join(late) or 'nothing'}; look at {', '.join(logs) or 'the log of that engine'}"
                ) from None


class _Calls:
    """One call to every replica; remembers the step and who has not answered, for error messages."""

    def __init__(self, session: aiohttp.ClientSession, urls: list[str], what: str) -> None:
        self._session, self.urls, self._what = session, urls, what
        self.step = ""
        self.waiting: set[str] = set()

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Answers by URL. Raises EngineError naming every replica that failed."""
        return await self._all(path, lambda url: self._request("POST", url, path, body))

    async def get(self, path: str) -> dict[str, Any]:
        """Answers by URL. Raises EngineError naming every replica that failed."""
        return await self._all(path, lambda url: self._request("GET", url, path, None))

    async def _all(self, path: str, call: Callable[[str], Coroutine[Any, Any, Any]]) -> dict[str, Any]:
        self.step = path.removeprefix("/")
        self.waiting = set(self.urls)
        results = await asyncio.gather(*(call(url) for url in self.urls), return_exceptions=True)
        failures = [r for r in results if isinstance(r, EngineError)]
        unexpected = [r for r in results if isinstance(r, BaseException) and not isinstance(r, EngineError)]
        if unexpected:
            raise unexpected[0]
        if failures:
            unreachable = any(isinstance(f, TransportError) for f in failures)
            raise self.failure("; ".join(map(str, failures)), TransportError if unreachable else EngineError)
        return dict(zip(self.urls, results, strict=True))

    async def _request(self, method: str, url: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            async with self._session.request(method, url + path, json=body) as response:
                answer = await response.read()
        except aiohttp.ClientError as error:
            raise TransportError(f"engine {url}: {type(error).__name__}: {error}; is it running?") from error
        if response.status in (502, 503):
            raise TransportError(f"engine {url}: HTTP {response.status}: {error_text(answer)}")
        if response.status != 200:
            raise EngineError(f"engine {url}: HTTP {response.status}: {error_text(answer)}")
        self.waiting.discard(url)
        try:
            value = orjson.loads(answer) if answer else None
        except orjson.JSONDecodeError:
            value = answer.decode(errors="replace")
        if isinstance(value, dict) and value.get("success") is False:
            raise EngineError(f"engine {url}: {value.get('message')}")
        return value

    def failure(self, reason: str, kind: type[EngineError] = EngineError) -> EngineError:
        """An error of the present step."""
        return kind(f"{self._what}: step {self.step} failed: {reason}")


async def _unless(interrupted: Callable[[], bool], calls: _Calls, action: Coroutine[Any, Any, T]) -> T:
    """What `action` returns; it is cancelled, with an error, when `interrupted()` comes first."""
    task = asyncio.ensure_future(action)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=POLL_S)
            if not task.done() and interrupted():
                raise calls.failure("interrupted")
        return task.result()
    finally:
        task.cancel()


async def _update_all(calls: _Calls, path: str, version: int, patience_s: float) -> str | None:
    """An engine that cannot be reached may be restarting: wait until all are ready, then begin again with all."""
    give_up = asyncio.get_running_loop().time() + patience_s
    while True:
        try:
            return await _update(calls, path, version)
        except TransportError as error:
            log.warning("%s; waiting up to %g s for it to come back", error, patience_s)
            try:
                async with asyncio.timeout_at(give_up):
                    await _wait_ready(calls)
            except TimeoutError:
                raise error from None


async def _update(calls: _Calls, path: str, version: int) -> str | None:
    await calls.post("/pause_generation", {"mode": "retract"})
    await _flush(calls)
    body = {"model_path": path, "flush_cache": True, "abort_all_requests": False, "weight_version": str(version)}
    await calls.post("/update_weights_from_disk", body)
    answers = await calls.post("/weights_checker", {"action": "checksum"})
    _require_equal(calls, _by_rank(calls, answers))
    await calls.post("/continue_generation", {})
    for url, info in (await calls.get("/model_info")).items():
        if not isinstance(info, dict) or _version(info.get("weight_version")) != version:
            found = info.get("weight_version") if isinstance(info, dict) else info
            raise calls.failure(f"engine {url}: reports weight_version {found!r} after the update to {version}")
    return next(iter(answers.values())).get("per_engine_checksum")


def _version(label: Any) -> int | None:
    try:
        return parse_version(label)
    except (TypeError, ValueError):
        return None


async def _flush(calls: _Calls) -> None:
    for attempt in range(FLUSH_ATTEMPTS):
        try:
            await calls.post("/flush_cache", {})
            return
        except TransportError:
            raise
        except EngineError:
            if attempt == FLUSH_ATTEMPTS - 1:
                raise
        await asyncio.sleep(FLUSH_PAUSE_S)


async def _checksums(calls: _Calls) -> dict[str, list[dict[str, str]]]:
    return _by_rank(calls, await calls.post("/weights_checker", {"action": "checksum"}))


def _by_rank(calls: _Calls, answers: dict[str, Any]) -> dict[str, list[dict[str, str]]]:
    try:
        return {url: [rank["checksums"] for rank in answer["ranks"]] for url, answer in answers.items()}
    except (KeyError, TypeError) as error:
        raise calls.failure(f"an answer has no ranks[].checksums ({error!r})") from error


def _require_equal(calls: _Calls, checksums: dict[str, list[dict[str, str]]]) -> None:
    """Replicas with as many tensor-parallel ranks must hold the same bytes."""
    first: dict[int, str] = {}
    for url, ranks in checksums.items():
        other = first.setdefault(len(ranks), url)
        for rank, (mine, theirs) in enumerate(zip(ranks, checksums[other], strict=True)):
            wrong = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
            if wrong:
                raise calls.failure(
                    f"engines {other} and {url} differ in {len(wrong)} parameters of rank {rank}, first {wrong[0]}; "
                    "do both read the same directory?"
                )


async def _wait_ready(calls: _Calls) -> None:
    while True:
        try:
            await calls.get("/ready")
            return
        except EngineError:
            await asyncio.sleep(POLL_S)
