"""Between HTTP and the scheduler: calls wait at the gate, become requests and get their answers. No routes here.

Lives in the event loop. Waits for: the gate (pause, update) and the scheduler's answers; both last as long as clients
want, who have deadlines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .gate import Gate
from .protocol import BadRequest, GenerateCall, GenerateRequest, Limits, PauseRequest
from .request import Request
from .responses import generation
from .scheduler import Load, Scheduler

T = TypeVar("T")


class EngineFailed(RuntimeError):
    """The engine could not compute an answer: status 500."""


@dataclass
class _Pending:
    """A call whose sequences are being computed."""

    left: int
    done: asyncio.Future[None]


class Service:
    """One served model. `attach` it before use.

    Args:
        limits: what requests are checked against.
        seed: of requests without a sampling_seed.
    """

    def __init__(self, limits: Limits, seed: int | None) -> None:
        self.limits = limits
        self._random = np.random.default_rng(seed)
        self.gate = Gate()
        self._rids: dict[str, GenerateCall] = {}
        self._pending: dict[Request, _Pending] = {}

    def attach(self, scheduler: Scheduler, loop: asyncio.AbstractEventLoop) -> None:
        """Connect the thread that decodes and the loop that this object lives in."""
        self._scheduler, self._loop = scheduler, loop

    def close(self) -> None:
        """Turn waiting calls away and end the scheduler, which aborts what it holds."""
        self.gate.close()
        self._scheduler.stop()

    # ------------------------------------------------------------------------------------------------- generation
    async def generate(self, body: GenerateRequest, disconnected: Callable[[], Awaitable[Any]]) -> Any:
        """The answer to /generate; None when the client went away (`disconnected` returned) before it was there.

        Raises:
            BadRequest: the body is wrong, or one of its rids is in use.
            EngineFailed: the engine could not compute a sequence.
            ShuttingDown: the server ends.
        """
        call = body.to_call(self.limits, self._fresh_seed)
        self._claim_rids(call)
        watch = asyncio.ensure_future(self._abort_after(disconnected, call))
        try:
            async with self.gate.generation():
                if not call.abandoned:
                    await self._compute(call)
        finally:
            watch.cancel()
            self._release_rids(call)
        if call.abandoned:
            return None
        answers = [generation(request, call.return_log_probs) for request in call.requests]
        return answers if call.as_list else answers[0]

    async def _compute(self, call: GenerateCall) -> None:
        pending = _Pending(len(call.requests), self._loop.create_future())
        self._pending |= dict.fromkeys(call.requests, pending)
        self._scheduler.submit(call.requests)
        await pending.done
        for request in call.requests:
            if (request.finish_reason or {}).get("status_code"):
                raise EngineFailed(f"{request.rid}: {request.finish_reason['message']}")  # type: ignore[index]

    def finished(self, requests: Sequence[Request]) -> None:
        """The scheduler's report, from its thread."""
        self._loop.call_soon_threadsafe(self._settle, requests)

    def _settle(self, requests: Sequence[Request]) -> None:
        for request in requests:
            pending = self._pending.pop(request)
            pending.left -= 1
            if not pending.left and not pending.done.done():
                pending.done.set_result(None)

    async def _abort_after(self, disconnected: Callable[[], Awaitable[Any]], call: GenerateCall) -> None:
        await disconnected()
        call.abandoned = True
        self._release_rids(call)
        mine = set(call.requests)
        self._scheduler.call(lambda: self._scheduler.abort(lambda request: request in mine))

    def _claim_rids(self, call: GenerateCall) -> None:
        used = [r.rid for r in call.requests if r.rid in self._rids]
        if used:
            raise BadRequest(f"Duplicate request ID detected: {used[0]} is still being generated.")
        self._rids |= dict.fromkeys((r.rid for r in call.requests), call)

    def _release_rids(self, call: GenerateCall) -> None:
        """Only those that are still its own: after an abort a retry may have claimed them already."""
        for request in call.requests:
            if self._rids.get(request.rid) is call:
                del self._rids[request.rid]

    def _fresh_seed(self) -> int:
        return int(self._random.integers(2**63))

    # ---------------------------------------------------------------------------------------------------- control
    def abort(self, rid: str | None, abort_all: bool) -> None:
        """Abort all, or those whose rid begins with `rid`, which must itself be one. Their rids are free at once.

        Does not wait. As in SGLang, a rid that no request has aborts nothing, even if it is the beginning of some.
        """
        if not abort_all and rid not in self._rids:
            return
        prefix = "" if abort_all else str(rid)
        for known in [known for known in self._rids if known.startswith(prefix)]:
            del self._rids[known]
        self._scheduler.call(lambda: self._scheduler.abort(lambda request: request.rid.startswith(prefix)))

    async def pause(self, body: PauseRequest) -> None:
        """Hold the calls at the gate, and what runs; mode abort answers that first. Raises ShuttingDown."""
        self.gate.pause()
        await self._call(lambda: self._scheduler.pause(body.mode))
        if body.mode == "abort":
            await self.gate.until_empty()

    async def resume(self) -> None:
        """End a pause, once the update in progress is done."""
        await self.gate.until_updated()
        await self._call(self._scheduler.resume)
        self.gate.resume()

    async def flush(self) -> bool:
        """Forget keys and values; False while requests run or wait."""
        return await self._call(self._scheduler.flush)

    async def load(self) -> Load:
        """What runs and waits, the calls at the gate not counted."""
        return await self._call(self._scheduler.load)

    @property
    def weight_version(self) -> str:
        """Name of the weights in force."""
        return self._scheduler.version

    @property
    def failed(self) -> bool:
        """Whether the scheduler has ended with an error."""
        return self._scheduler.failure is not None

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._scheduler.call(function))
