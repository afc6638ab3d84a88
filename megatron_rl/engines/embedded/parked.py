"""Keys and values of sequences that have ended and may be continued: a response that is generated in segments.

Whoever continues a sequence sends all of its tokens; only the last of them has not been computed yet. Longer additions
are not looked for: they are computed afresh.
"""

from __future__ import annotations

from collections import OrderedDict

from .kv_cache import Saved
from .request import Tokens


class Parked:
    """The least recently parked go first.

    Args:
        max_sequences: how many are kept.
        budget: how many bytes.
    """

    def __init__(self, max_sequences: int, budget: int) -> None:
        self._max_sequences, self._budget = max_sequences, budget
        self._kept: OrderedDict[bytes, Saved] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, tokens: Tokens, saved: Saved) -> None:
        """Keep what was computed of `tokens`."""
        self.take(tokens)
        self._kept[tokens.tobytes()] = saved
        self._bytes += saved.nbytes
        while len(self._kept) > self._max_sequences or self._bytes > self._budget:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes

    def take(self, tokens: Tokens) -> Saved | None:
        """What was computed of exactly these tokens, which is then gone."""
        saved = self._kept.pop(tokens.tobytes(), None)
        if saved is not None:
            self._bytes -= saved.nbytes
        return saved

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
        self._bytes = 0
