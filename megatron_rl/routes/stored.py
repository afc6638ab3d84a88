"""Routes of the sequences of one batch, read from the store when they are asked for; nothing is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from .store import RoutePart, RouteStore


class StoredRoutes:
    """`parts[i]` are those of sequence i, in any order."""

    def __init__(self, store: RouteStore, parts: Sequence[Sequence[RoutePart]]) -> None:
        self._store, self._parts = store, parts

    def __len__(self) -> int:
        """Sequences."""
        return len(self._parts)

    def rows(self, sequence: int, layers: Sequence[int], begin: int, end: int) -> NDArray[np.int16]:
        """Tokens [begin, end) of a sequence, int16 [layers, end - begin, top_k]; see `RouteStore.read`."""
        return self._store.read(self._parts[sequence], layers, begin, end)

    def select(self, indices: Iterable[int]) -> StoredRoutes:
        """The sequences at `indices`, in that order."""
        return StoredRoutes(self._store, [self._parts[i] for i in indices])
