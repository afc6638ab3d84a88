"""Which replica gets a request: sticky by group, else the least loaded. Knows no HTTP and no protocol."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager


class Router:
    """Counts sequences in flight per replica.

    A replica whose connection failed is tried last for `cooldown_s`; it is never given up: it may be the only one.

    >>> router = Router(["http://a", "http://b"])
    >>> with router.route("g1", 16) as first, router.route("g2", 16) as second:
    ...     first, second
    ('http://a', 'http://b')
    """

    def __init__(
        self, urls: Sequence[str], cooldown_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not urls:
            raise ValueError("a router needs at least one engine; set engine.urls, or let the run start engines")
        self._load = dict.fromkeys(urls, 0)
        self._home: dict[str, str] = {}
        self._failed_at: dict[str, float] = {}
        self._cooldown_s, self._clock = cooldown_s, clock

    @property
    def urls(self) -> list[str]:
        """All replicas."""
        return list(self._load)

    @contextmanager
    def route(self, key: str, sequences: int) -> Iterator[str]:
        """The replica for `key`; its load counts while the block runs. Requests of one key share its prefix cache."""
        url = self._home.setdefault(key, min(self._load, key=self._rank))
        self._load[url] += sequences
        try:
            yield url
        finally:
            self._load[url] -= sequences

    def failed(self, key: str, url: str) -> None:
        """A connection for `key` failed: it finds a new home, and the replica is tried last for a while."""
        self._home.pop(key, None)
        self._failed_at[url] = self._clock()

    def home(self, key: str) -> str | None:
        """Where requests of `key` go, if it has been routed."""
        return self._home.get(key)

    def forget(self, key: str) -> None:
        """The group is finished."""
        self._home.pop(key, None)

    def _rank(self, url: str) -> tuple[bool, int]:
        cooling = self._clock() - self._failed_at.get(url, float("-inf")) < self._cooldown_s
        return cooling, self._load[url]


class Gate:
    """Lets at most `limit` sequences through at once, in order of arrival; a request larger than that goes alone."""

    def __init__(self, limit: int) -> None:
        self._limit = self._free = limit
        self._queue: deque[tuple[asyncio.Future[None], int]] = deque()

    @asynccontextmanager
    async def hold(self, sequences: int) -> AsyncIterator[None]:
        """Wait for room, and keep it while the block runs."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = (turn, min(sequences, self._limit))
        self._queue.append(ticket)
        self._admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._free += ticket[1]
            self._admit()

    def _admit(self) -> None:
        """A ticket whose task was cancelled stays in the queue until it comes to the front."""
        while self._queue and (self._queue[0][0].cancelled() or self._queue[0][1] <= self._free):
            turn, share = self._queue.popleft()
            if not turn.cancelled():
                self._free -= share
                turn.set_result(None)
