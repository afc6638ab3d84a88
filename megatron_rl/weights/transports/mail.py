"""Messages between trainer ranks through their key-value store: who waits polls, with a deadline; no collective."""

from __future__ import annotations

import pickle
import time
from typing import Any, Protocol

from megatron_rl.weights import WeightsError

POLL_S = 0.002


class Store(Protocol):
    """What is used of torch's key-value stores (their own stub has no bytes)."""

    def set(self, key: str, value: Any, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def delete_key(self, key: str, /) -> bool: ...


class Mail:
    """Messages under names that are used once.

    Args:
        store: shared by all ranks.
        prefix: of the names.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def post(self, name: str, message: Any) -> None:
        """Leave a picklable message."""
        self._store.set(f"{self._prefix}/{name}", pickle.dumps(message))

    def take(self, name: str, timeout_s: float, what: str) -> Any:
        """The message, when it is there.

        Raises:
            WeightsError: it did not come within `timeout_s`; says `what` was awaited.
        """
        key, deadline = f"{self._prefix}/{name}", time.monotonic() + timeout_s
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise WeightsError(f"waited {timeout_s:.0f} s for {what}; see the logs of the other trainer ranks")
            time.sleep(POLL_S)
        return pickle.loads(self._store.get(key))

    def burn(self, name: str) -> None:
        """Remove a message that everybody has read."""
        self._store.delete_key(f"{self._prefix}/{name}")
