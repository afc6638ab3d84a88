"""Which replica gets a request: sticky by group, else the least loaded that serves. Knows no HTTP and no protocol."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

REMEMBERED = 65536
"""Groups whose replica is remembered, for its prefix cache."""


class Router:
    """Counts sequences in flight per replica; all serve at first.

    >>> router = Router(["http://a", "http://b"])
    >>> with router.route("g1", 16) as first, router.route("g2", 16) as second:
    ...     first, second
    ('http://a', 'http://b')
    >>> router.serve(["http://b"])
    >>> with router.route("g1", 16) as moved:
    ...     moved
    'http://b'
    """

    def __init__(self, urls: Sequence[str]) -> None:
        if not urls:
            raise ValueError("a router needs at least one engine; set engine.urls, or let the run start engines")
        self._load = dict.fromkeys(urls, 0)
        self._foreign = dict.fromkeys(urls, 0)
        self._serving = set(urls)
        self._home: OrderedDict[str, str] = OrderedDict()

    def serve(self, urls: Collection[str]) -> None:
        """From now on requests go to these only."""
        self._serving = set(urls) & self._load.keys()

    @contextmanager
    def route(self, key: str, sequences: int) -> Iterator[str | None]:
        """The replica for `key`, None when none serves; its load counts while the block runs.

        Requests of one key go to one replica as long as it serves: they share its prefix cache.
        """
        url = self._home.get(key)
        if url not in self._serving:
            url = min((u for u in self._load if u in self._serving), key=self._rank, default=None)
        if url is None:
            yield None
            return
        self._remember(key, url)
        self._load[url] += sequences
        try:
            yield url
        finally:
            self._load[url] -= sequences

    def report(self, url: str, sequences: int) -> None:
        """What the replica says it has, waiting and running: what is not ours belongs to others who use it."""
        self._foreign[url] = max(0, sequences - self._load[url])

    def _remember(self, key: str, url: str) -> None:
        self._home[key] = url
        self._home.move_to_end(key)
        if len(self._home) > REMEMBERED:
            self._home.popitem(last=False)

    def _rank(self, url: str) -> int:
        return self._load[url] + self._foreign[url]


class Gate:
    """Lets at most `limit` sequences through at once, in order of arrival; a request larger than that goes alone."""

    def __init__(self, limit: int) -> None:
        self._limit = self._free = limit
        self._queue: deque[Ticket] = deque()

    @contextmanager
    def ticket(self, sequences: int) -> Iterator[Ticket]:
        """A place in the queue and then room, until the block ends; `turn` is done when there is room."""
        ticket = Ticket(self, min(sequences, self._limit))
        self._queue.append(ticket)
        self._admit()
        try:
            yield ticket
        finally:
            admitted = ticket.turn.done() and not ticket.turn.cancelled()
            ticket.turn.cancel()
            self._give_back(ticket.share if admitted else 0)

    def keep(self, ticket: Ticket, sequences: int) -> None:
        """So many sequences are left of those that the ticket was for."""
        surplus = max(0, ticket.share - sequences)
        ticket.share -= surplus
        self._give_back(surplus)

    def _give_back(self, share: int) -> None:
        self._free += share
        self._admit()

    def _admit(self) -> None:
        """A ticket whose owner has left stays in the queue until it comes to the front."""
        while self._queue and (self._queue[0].turn.cancelled() or self._queue[0].share <= self._free):
            ticket = self._queue.popleft()
            if not ticket.turn.cancelled():
                self._free -= ticket.share
                ticket.turn.set_result(None)


class Ticket:
    """Room for `share` sequences, from the moment that `turn` is done."""

    def __init__(self, gate: Gate, share: int) -> None:
        self._gate, self.share = gate, share
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def keep(self, sequences: int) -> None:
        """Give back what is not needed for so many sequences."""
        self._gate.keep(self, sequences)
