"""Agreement between trainer ranks on what only rank 0 does (HTTP to controller and engines), without a collective.

    rank 0:  runs the call                -> puts ("ok", result) or ("error", message) under a key of the TCPStore
    others:  poll the key with a deadline -> return the result, or raise the same error

A rank never waits for rollouts inside NCCL or gloo: it polls, so it can be signalled, and it says what it waits for.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


class Store(Protocol):
    """What is used of torch's key-value stores (their own stub has no bytes)."""

    def set(self, key: str, value: Any, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def delete_key(self, key: str, /) -> bool: ...


class RankZeroError(RuntimeError):
    """What rank 0 was doing failed, or did not end in time; every rank raises it with the same message."""


def unless_ending(call: Callable[[], T], failure: type[Exception], ending: Callable[[], bool]) -> T | None:
    """What `call` returns; None when it raises `failure` since the run is `ending`: whom it called may be gone."""
    try:
        return call()
    except failure as error:
        if not ending():
            raise
        log.info("the run is ending; %s", error)
        return None


class RankZero:
    """Runs calls on rank 0 and shares what they return.

    Args:
        store: key-value store that all ranks share.
        rank: this process's rank.
        poll_s: pause between two looks at the store.
    """

    def __init__(self, store: Store, rank: int, poll_s: float = 0.005) -> None:
        self.store = store
        self._rank, self._poll_s = rank, poll_s
        self._count = 0

    @property
    def is_zero(self) -> bool:
        return self._rank == 0

    def run(self, what: str, call: Callable[[], T], timeout_s: float) -> T:
        """Run `call` on rank 0; every rank returns its (picklable) result. All ranks must make the same calls in order.

        Raises:
            RankZeroError: the call raised on rank 0, or `timeout_s` passed. The message says what was waited for.
        """
        self._count += 1
        key = f"rank_zero/{self._count}"
        if self._rank == 0:
            return self._run_and_share(what, call, key)
        return self._await(what, key, timeout_s)

    def _run_and_share(self, what: str, call: Callable[[], T], key: str) -> T:
        try:
            result = call()
        except BaseException as error:
            self.store.set(key, pickle.dumps(("error", f"{what}: {error}")))
            raise
        self.store.set(key, pickle.dumps(("ok", result)))
        # 64 calls span several steps, whose collectives hold the ranks together: everyone has read this one.
        self.store.delete_key(f"rank_zero/{self._count - 64}")
        return result

    def _await(self, what: str, key: str, timeout_s: float) -> Any:
        deadline, said = time.monotonic() + timeout_s, time.monotonic() + 60
        while not self.store.check([key]):
            now = time.monotonic()
            if now > deadline:
                raise RankZeroError(f"rank {self._rank} waited {timeout_s:.0f} s for rank 0: {what}; see trainer-0.log")
            if now > said:
                log.info("waiting for rank 0: %s", what)
                said = now + 60
            time.sleep(self._poll_s)
        kind, value = pickle.loads(self.store.get(key))
        if kind == "error":
            raise RankZeroError(value)
        return value
