"""Requests on their way and how they are called back: suspension, replicas that went out. What is asked is `client.py`.

A suspended request is aborted at its engine, which answers with what it has. An abort can be lost (one that overtakes
its request is), so it is sent again every second; an engine that gives no answer all the same is given up, with the
segment that it was generating.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

RESEND_ABORT_S = 1.0
ABORT_DEADLINE_S = 30.0
Abort = Callable[[str, Sequence[str]], Awaitable[None]]


class Flight:
    """One request, sent to the replica `url`."""

    def __init__(self, url: str, rids: Sequence[str]) -> None:
        self.url, self.rids = url, rids
        self.dropped: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def drop(self, reason: str) -> None:
        """Wait for its answer no longer."""
        if not self.dropped.done():
            self.dropped.set_result(reason)


class Run:
    """One call to generate: its requests, and whether it was told to stop."""

    def __init__(self, groups: Collection[str], abort: Abort) -> None:
        self.groups, self._abort = frozenset(groups), abort
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._landed = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self.flights: set[Flight] = set()

    @property
    def suspended(self) -> bool:
        """Whether no further request may be sent."""
        return self._stopped.done()

    def suspend(self) -> None:
        """Stop: what waits is woken, what is on its way is aborted until its answer is there."""
        if not self.suspended:
            self._stopped.set_result(None)
            self._ending = asyncio.create_task(self._abort_until_answered())

    async def before_suspension(self, awaited: asyncio.Future[Any]) -> bool:
        """Whether `awaited` is done before the run is told to stop. Raises what it raised."""
        if not awaited.done() and not self.suspended:
            await asyncio.wait({awaited, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
        if self.suspended or not awaited.done():
            return False
        awaited.result()
        return True

    @contextmanager
    def flight(self, url: str, rids: Sequence[str]) -> Iterator[Flight]:
        """While the block runs, the request counts as on its way."""
        flight = Flight(url, rids)
        self.flights.add(flight)
        try:
            yield flight
        finally:
            self.flights.discard(flight)
            self._landed.set()

    async def close(self) -> None:
        """The call is over."""
        if self._ending is not None:
            self._ending.cancel()
            await asyncio.gather(self._ending, return_exceptions=True)

    async def _abort_until_answered(self) -> None:
        clock = asyncio.get_running_loop().time
        give_up = clock() + ABORT_DEADLINE_S
        while self.flights:
            if clock() >= give_up:
                for flight in self.flights:
                    flight.drop(f"no answer within {ABORT_DEADLINE_S:g} s to an abort, sent every {RESEND_ABORT_S:g} s")
                return
            self._landed.clear()
            await asyncio.gather(*(self._abort(flight.url, flight.rids) for flight in tuple(self.flights)))
            with suppress(TimeoutError):
                async with asyncio.timeout(RESEND_ABORT_S):
                    await self._landed.wait()


class Runs:
    """All calls to generate that are under way."""

    def __init__(self, abort: Abort) -> None:
        self._abort = abort
        self._runs: set[Run] = set()

    @contextmanager
    def open(self, groups: Collection[str]) -> Iterator[Run]:
        """A run for the block."""
        run = Run(groups, self._abort)
        self._runs.add(run)
        try:
            yield run
        finally:
            self._runs.discard(run)

    def suspend(self, groups: Collection[str]) -> None:
        """Suspend the runs with samples of any of these groups."""
        for run in tuple(self._runs):
            if not run.groups.isdisjoint(groups):
                run.suspend()

    def drop(self, url: str, reason: str) -> None:
        """Give up the requests that are at this replica."""
        for run in self._runs:
            for flight in run.flights:
                if flight.url == url:
                    flight.drop(reason)
