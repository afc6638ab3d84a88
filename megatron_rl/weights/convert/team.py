"""The ranks that share one conversion: which files are whose, and what they tell each other. No tensor is ever sent.

Every rank writes whole files by itself; rank 0 alone begins and finishes the directory. They share a file system and a
key-value store, through which a rank waits for the word of another one. Such a wait ends when the other one has failed,
or has written nothing for `STALE_S` seconds.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from megatron_rl.weights import WeightsError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

STALE_S = 900.0
"""A rank that has not told of a byte for so long is taken for lost."""
_POLL_S, _TELL_S, _LAST_S = 0.05, 0.5, 10.0
_FAILED = "failed"


class Team:
    """This rank among `size`; without a store the only one.

    Args:
        store: of these ranks alone, whose deadlines are longer than a poll.
        stale_s: see `STALE_S`.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None, stale_s: float = STALE_S) -> None:
        self.rank, self.size = rank, size
        self._store, self._stale_s = store, stale_s
        self._unsaid, self._total, self._said_at = 0, 0, time.monotonic()

    def from_first(self, key: str, function: Callable[[], Any]) -> Any:
        """What `function` returns on rank 0, where alone it is called; anything that JSON can hold. Collective."""
        if self.size == 1:
            return function()
        if self.rank == 0:
            value = function()
            self._set(key, value)
            return value
        return self._wait(key, 0)

    def of_all(self, key: str, value: Any) -> list[Any]:
        """Every rank's value, by rank. Collective: no rank goes on before all have come here."""
        if self.size == 1:
            return [value]
        if self.rank > 0:
            self._set(f"{key}/{self.rank}", value)
        return self.from_first(
            key, lambda: [value, *(self._wait(f"{key}/{rank}", rank) for rank in range(1, self.size))]
        )

    def advance(self, size: int) -> int:
        """This rank has handled `size` bytes more; returns by how much the bytes of all ranks have grown since."""
        self._unsaid += size
        if self._store is None:
            size, self._unsaid = self._unsaid, 0
            return size
        if time.monotonic() < self._said_at + _TELL_S:
            return 0
        self._stop_if_failed()
        self._ask(lambda store: store.add(f"beat/{self.rank}", 1))
        before, self._total = self._total, self._ask(lambda store: store.add("bytes", self._unsaid))
        self._unsaid, self._said_at = 0, time.monotonic()
        return self._total - before

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Whatever ends this block with an exception ends it on the other ranks as well, at their next word."""
        try:
            yield
        except BaseException as error:
            if self._store is not None:
                self._say_why(error)
            raise

    def _say_why(self, error: BaseException) -> None:
        """Rank 0 stays a moment, until the others have heard it: its store ends with it."""
        with suppress(_OtherRankError):
            if not isinstance(error, _OtherRankError):
                self._set(_FAILED, f"rank {self.rank}: {error or type(error).__name__}")
            self._set(f"left/{self.rank}", True)
            others = [f"left/{rank}" for rank in range(1, self.size)]
            until = time.monotonic() + min(_LAST_S, self._stale_s)
            while self.rank == 0 and time.monotonic() < until and not self._ask(lambda store: store.check(others)):
                time.sleep(_POLL_S)

    def leave(self) -> None:
        """The last word: rank 0, which holds the store, goes when all others have gone. Collective."""
        if self.rank > 0:
            self._set(f"left/{self.rank}", True)
            return
        for rank in range(1, self.size):
            self._wait(f"left/{rank}", rank)

    def _wait(self, key: str, rank: int) -> Any:
        """The value that `rank` sets."""
        beat, since = -1, time.monotonic()
        while not self._ask(lambda store: store.check([key])):
            self._stop_if_failed()
            if (now := self._ask(lambda store: store.add(f"beat/{rank}", 0))) != beat:
                beat, since = now, time.monotonic()
            if time.monotonic() > since + self._stale_s:
                raise WeightsError(
                    f"rank {rank} has written nothing for {self._stale_s:.0f} s, and rank {self.rank} waits for it "
                    f"({key}); it has ended or its disk hangs: see its log, then give the same command again"
                )
            time.sleep(_POLL_S)
        return json.loads(self._ask(lambda store: store.get(key)))

    def _stop_if_failed(self) -> None:
        if self._ask(lambda store: store.check([_FAILED])):
            raise _OtherRankError(
                f"{json.loads(self._ask(lambda store: store.get(_FAILED)))} (rank {self.rank} ends with it)"
            )

    def _set(self, key: str, value: Any) -> None:
        text = json.dumps(value)
        self._ask(lambda store: store.set(key, text))

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        try:
            return question(self._store)
        except RuntimeError as error:  # torch's DistError among them
            raise _OtherRankError(f"rank 0 is gone, as rank {self.rank} sees it ({error}); see rank 0's log") from error


class _OtherRankError(WeightsError):
    """Another rank has failed, and has said why."""


ALONE = Team()


def shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Positions in `sizes` for each rank, in order: the largest that is left goes to the rank with the fewest bytes.

    >>> shares([5, 5, 5, 1, 4], 2)
    [[0, 2], [1, 3, 4]]
    """
    found: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for position in sorted(range(len(sizes)), key=lambda position: -sizes[position]):
        load, rank = heapq.heappop(loads)
        found[rank].append(position)
        heapq.heappush(loads, (load + sizes[position], rank))
    return [sorted(positions) for positions in found]
