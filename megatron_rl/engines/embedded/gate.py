"""Who may pass when: generation calls wait while the engine is paused or its weights are being replaced, and are turned
away while its memory is released."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


class ShuttingDown(Exception):
    """The server ends; who waited at the gate is turned away."""


class MemoryReleased(Exception):
    """What is asked for needs memory that was given away."""


class Gate:
    """Many generation calls pass at once; an update outside a pause passes alone. Lives in one event loop.

    No wait here has a deadline: it lasts as long as whoever paused, or what is being generated; clients have theirs.
    """

    def __init__(self) -> None:
        self.paused = self._closed = self._updating = False
        self._inside = self._updates = 0
        self.released: frozenset[str] = frozenset()
        """Kinds of memory that were given away."""
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def generation(self) -> AsyncIterator[None]:
        """Wait until no pause and no update, running or waiting, is in the way. Raises ShuttingDown, MemoryReleased."""
        await self._until(lambda: not self.paused and not self._updates)
        self.require_memory(*self.released)
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._wake()

    @asynccontextmanager
    async def update(self) -> AsyncIterator[None]:
        """Wait for generation calls to leave, unless paused: a pause holds what is inside. Updates pass one by one.

        Raises ShuttingDown.
        """
        self._updates += 1
        try:
            await self._until(lambda: not self._updating and (self.paused or not self._inside))
            self._updating = True
            try:
                yield
            finally:
                self._updating = False
        finally:
            self._updates -= 1
            self._wake()

    @property
    def occupied(self) -> bool:
        """Whether generation calls are inside."""
        return self._inside > 0

    def require_memory(self, *tags: str) -> None:
        """Raises MemoryReleased when one of these kinds of memory was given away."""
        missing = sorted(self.released.intersection(tags))
        if missing:
            raise MemoryReleased(f"memory is released: {', '.join(missing)}; call /resume_memory_occupation first")

    def pause(self) -> None:
        """Let no generation call in from now on."""
        self.paused = True
        self._wake()

    def resume(self) -> None:
        """Let generation calls in again."""
        self.paused = False
        self._wake()

    def close(self) -> None:
        """Turn away all who wait."""
        self._closed = True
        self._wake()

    async def until_updated(self) -> None:
        """Wait until no update is in progress. Raises ShuttingDown."""
        await self._until(lambda: not self._updating)

    async def until_empty(self) -> None:
        """Wait until the generation calls inside have been answered. Raises ShuttingDown."""
        await self._until(lambda: not self._inside)

    async def unless_closed(self, future: asyncio.Future[T]) -> T:
        """The future's result. Raises ShuttingDown when the server ends before it is there."""
        future.add_done_callback(lambda _: self._wake())
        await self._until(future.done)
        return future.result()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while True:
            if self._closed:
                raise ShuttingDown
            if condition():
                return
            await self._changed.wait()

    def _wake(self) -> None:
        """All waiters look again. A fresh event each time: who waits next waits for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()
