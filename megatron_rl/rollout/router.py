"""Which replica gets a request: sticky by group, else the least loaded that serves. Knows no HTTP and no protocol."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence

REMEMBERED = 8192
"""Groups whose replica is remembered, for its prefix cache."""


class Router:
    """Counts sequences in flight per replica; all serve at first.

    >>> router = Router(["http://a", "http://b"])
    >>> router.take("g1", 16), router.take("g2", 16)
    ('http://a', 'http://b')
    >>> router.serve(["http://b"])
    >>> router.take("g1", 16)
    'http://b'
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._load = dict.fromkeys(urls, 0)
        self._foreign = dict.fromkeys(urls, 0)
        self._serving = set(urls)
        self._home: OrderedDict[str, str] = OrderedDict()

    def serve(self, urls: Collection[str]) -> None:
        """From now on requests go to these only."""
        self._serving = set(urls) & self._load.keys()

    def take(self, key: str, sequences: int, busy: str | None = None) -> str | None:
        """The replica for `key`, None when none serves; they count as its load until they are `left`.

        Requests of one key go to one replica as long as it serves: they share its prefix cache. Only one that is `busy`
        is left for another, if there is one.
        """
        url = self._home.get(key)
        if url not in self._serving or url == busy:
            serving = [u for u in self._load if u in self._serving]
            url = min([u for u in serving if u != busy] or serving, key=self._rank, default=None)
            if url is None:
                return None
            self._home[key] = url
        self._home.move_to_end(key)
        if len(self._home) > REMEMBERED:
            self._home.popitem(last=False)
        self._load[url] += sequences
        return url

    def left(self, url: str, sequences: int) -> None:
        """They are at the replica no longer."""
        self._load[url] -= sequences

    def report(self, url: str, sequences: int) -> None:
        """What the replica says it has, waiting and running: what is not ours belongs to others who use it."""
        self._foreign[url] = max(0, sequences - self._load[url])

    def _rank(self, url: str) -> int:
        return self._load[url] + self._foreign[url]


class Gate:
    """Lets at most `limit` sequences through at once, in order of arrival; a request larger than that goes alone."""

    def __init__(self, limit: int) -> None:
        self._limit = self._free = limit
        self._queue: deque[Ticket] = deque()

    def ticket(self, sequences: int) -> Ticket:
        """A place in the queue, and then room, until it is given back. Use it in a `with` block."""
        ticket = Ticket(self, min(sequences, self._limit))
        self._queue.append(ticket)
        self.admit(0)
        return ticket

    def admit(self, given_back: int) -> None:
        """Let in whom there is room for. A ticket whose owner has left stays until it comes to the front."""
        self._free += given_back
        while self._queue and (self._queue[0].closed or self._queue[0].share <= self._free):
            ticket = self._queue.popleft()
            if not ticket.closed:
                self._free -= ticket.share
                ticket.let_in()


class Ticket:
    """Room for `share` sequences, once it is admitted."""

    def __init__(self, gate: Gate, share: int) -> None:
        self._gate, self.share = gate, share
        self._turn: asyncio.Future[None] | None = None
        self.admitted = self.closed = False

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True
        self._gate.admit(self.share if self.admitted else 0)

    @property
    def turn(self) -> asyncio.Future[None]:
        """Done when it is admitted."""
        if self._turn is None:
            self._turn = asyncio.get_running_loop().create_future()
            if self.admitted:
                self._turn.set_result(None)
        return self._turn

    def let_in(self) -> None:
        """For the gate."""
        self.admitted = True
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    def keep(self, sequences: int) -> None:
        """Give back what is not needed for so many sequences."""
        surplus = max(0, self.share - sequences)
        self.share -= surplus
        if surplus:
            self._gate.admit(surplus)
