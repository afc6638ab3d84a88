"""In which order prompts are used, and where a resumed run goes on; holds no prompts itself.

The order is a pure function of (seed, epoch): nothing but a count has to be saved, and every prompt comes exactly
once an epoch whatever the sizes of the requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .records import DataError


class PromptCursor:
    """Deals the indices of a dataset of `size` records, at least 1, epoch after epoch.

    >>> cursor = PromptCursor(3, seed=0, shuffle=False)
    >>> cursor.next(2), cursor.next(2)
    ([0, 1], [2, 0])

    `fingerprint` is the dataset's, so that a state is only taken back for the same data. `drawn` counts all indices
    dealt so far; the n-th one ever dealt (from 0) is `index_at(n)` of epoch `n // size`.
    """

    def __init__(self, size: int, seed: int, shuffle: bool = True, fingerprint: str = "") -> None:
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self.fingerprint = fingerprint
        self.drawn = 0
        self._order_epoch = -1
        self._order: np.ndarray = np.empty(0, dtype=np.int64)

    def next(self, count: int) -> list[int]:
        """The next `count` indices; runs on into the next epoch."""
        dealt = [self.index_at(ordinal) for ordinal in range(self.drawn, self.drawn + count)]
        self.drawn += count
        return dealt

    def index_at(self, ordinal: int) -> int:
        """The index dealt as number `ordinal`, counted from 0 since the run began; changes nothing."""
        epoch, position = divmod(ordinal, self.size)
        if not self.shuffle:
            return position
        if epoch != self._order_epoch:
            self._order, self._order_epoch = _permutation(self.size, self.seed, epoch), epoch
        return int(self._order[position])

    def state_dict(self) -> dict[str, Any]:
        """What to save; plain JSON values."""
        return {
            "size": self.size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
            "drawn": self.drawn,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the saved cursor was. Raises `DataError` when it dealt from other data or in another order."""
        mine = self.state_dict() | {"drawn": state["drawn"]}
        different = [f"{key} {state[key]!r} then, {now!r} now" for key, now in mine.items() if state[key] != now]
        if different:
            raise DataError(
                f"the saved data position belongs to other prompts or another order ({'; '.join(different)}); "
                "resume with the data and seed of the first run, or start a new run"
            )
        self.drawn = state["drawn"]


def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """Indices 0..size-1 in the order of one epoch, int64 [size].

    Sorted random bits rather than `Generator.permutation`: numpy promises the same bits in every version, but not the
    same shuffling, and a run may be resumed after an upgrade.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(size)
    return np.argsort(bits, kind="stable")
