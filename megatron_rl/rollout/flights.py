"""Requests on their way and how they are called back: suspension, replicas that went out. What is asked is `client.py`.

A suspended request is aborted at its engine, which answers with what it has. An abort can be lost (one that overtakes
its request is), so it is sent again every second; an engine that gives no answer all the same is given up, with the
segment that it was generating.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

RESEND_ABORT_S = 1.0
ABORT_DEADLINE_S = 30.0
Abort = Callable[[str, Sequence[str]], Awaitable[None]]


class Flight:
    """One request, sent to the replica `url`."""

    def __init__(self, url: str, rids: Sequence[str]) -> None:
        self.url, self.rids = url, rids
        self.deadline: asyncio.Timeout | None = None
        """Under which its answer is awaited."""
        self.dropped = ""
        """Why it is waited for no longer."""

    def drop(self, reason: str) -> None:
        """Have the waiting end at once, with a TimeoutError."""
        if not self.dropped:
            self.dropped = reason
            assert self.deadline is not None, "a flight is visible before it has a deadline"
            self.deadline.reschedule(asyncio.get_running_loop().time())


class Run:
    """One call to generate: its requests, and whether it was told to stop. Belongs to `runs` in a `with` block."""

    def __init__(self, groups: set[str], runs: Runs) -> None:
        self.groups, self._runs = groups, runs
        self._stops: set[asyncio.Future[None]] = set()
        self._landed: asyncio.Event | None = None
        self._ending: asyncio.Task[None] | None = None
        self.suspended = False
        """Whether no further request may be sent."""
        self.flights: set[Flight] = set()

    def __enter__(self) -> Run:
        self._runs.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._runs.discard(self)

    def suspend(self) -> None:
        """Stop: what waits is woken, what is on its way is aborted until its answer is there."""
        if not self.suspended:
            self.suspended = True
            for stop in self._stops:
                if not stop.done():
                    stop.set_result(None)
            self._ending = asyncio.create_task(self._abort_until_answered())

    async def before_suspension(self, awaited: asyncio.Future[Any]) -> bool:
        """Whether `awaited` is done before the run is told to stop. Raises what it raised."""
        if not self.suspended and not awaited.done():
            stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._stops.add(stop)
            try:
                await asyncio.wait({awaited, stop}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._stops.discard(stop)
        if self.suspended:
            return False
        awaited.result()
        return True

    async def pause(self, seconds: float) -> None:
        """Sleep, no longer than until the run is told to stop."""
        sleeping = asyncio.ensure_future(asyncio.sleep(seconds))
        try:
            await self.before_suspension(sleeping)
        finally:
            sleeping.cancel()

    def took_off(self, flight: Flight) -> None:
        """A request is on its way."""
        self.flights.add(flight)

    def landed(self, flight: Flight) -> None:
        """It is not any more."""
        self.flights.discard(flight)
        if self._landed is not None:
            self._landed.set()

    async def close(self) -> None:
        """The call is over."""
        if self._ending is not None:
            self._ending.cancel()
            await asyncio.gather(self._ending, return_exceptions=True)

    async def _abort_until_answered(self) -> None:
        clock = asyncio.get_running_loop().time
        give_up, self._landed = clock() + ABORT_DEADLINE_S, asyncio.Event()
        while self.flights:
            if clock() >= give_up:
                for flight in self.flights:
                    flight.drop(f"no answer within {ABORT_DEADLINE_S:g} s to an abort, sent every {RESEND_ABORT_S:g} s")
                return
            self._landed.clear()
            await asyncio.gather(*(self._runs.abort(flight.url, flight.rids) for flight in tuple(self.flights)))
            with suppress(TimeoutError):
                async with asyncio.timeout(RESEND_ABORT_S):
                    await self._landed.wait()


class Runs(set[Run]):
    """All calls to generate that are under way."""

    def __init__(self, abort: Abort) -> None:
        super().__init__()
        self.abort = abort

    def suspend(self, groups: Collection[str]) -> None:
        """Suspend the runs with samples of any of these groups."""
        for run in tuple(self):
            if not run.groups.isdisjoint(groups):
                run.suspend()

    def drop(self, url: str, reason: str) -> None:
        """Give up the requests that are at this replica."""
        for run in self:
            for flight in run.flights:
                if flight.url == url:
                    flight.drop(reason)
