"""The sequences being decoded, as arrays with one row per cache slot. Nothing here runs the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .request import LogProbs, Request, Tokens, failed, out_of_length, stopped
from .sampler import SamplingBatch

Rows = NDArray[np.int64]

_ROW = np.dtype(
    [
        ("token", np.int64),  # last drawn, not yet in the cache
        ("position", np.int64),  # of `token` in its sequence
        ("generated", np.int64),
        ("max_new_tokens", np.int64),
        ("top_k", np.int64),
        ("seed", np.uint64),
        ("stop_set", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
    ],
    align=True,
)
_OUTPUT_BLOCK = 64


class Batch:
    """Rows 0 .. len - 1 are live. What a step does to all of them is array code; only arrivals and departures loop."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.requests: list[Request] = []
        self._rows = np.zeros(max_rows, _ROW)
        self._tokens = np.zeros((max_rows, _OUTPUT_BLOCK), np.int64)
        self._log_probs = np.zeros((max_rows, _OUTPUT_BLOCK), np.float32)
        self._stop_sets = _StopSets(vocab_size)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def last_tokens(self) -> Tokens:
        """int64 [len], contiguous."""
        return np.ascontiguousarray(self._rows["token"][: len(self)])

    @property
    def positions(self) -> Tokens:
        """Positions of `last_tokens`, int64 [len], contiguous."""
        return np.ascontiguousarray(self._rows["position"][: len(self)])

    @property
    def longest(self) -> int:
        """Most tokens that any live sequence has in the cache."""
        return int(self._rows["position"][: len(self)].max(initial=0))

    @property
    def cached_tokens(self) -> int:
        """Tokens in the cache, over all sequences."""
        return int(self._rows["position"][: len(self)].sum())

    @property
    def final_length(self) -> int:
        """Most tokens that any live sequence may come to have."""
        return max((r.final_length for r in self.requests), default=0)

    def add(self, requests: Sequence[Request]) -> slice:
        """Give each request a row, in order, ready to `record` the token after its prompt and earlier output.

        Their last token counts as not yet in the cache, as if it had just been drawn.
        """
        first = len(self)
        if not self.requests:
            self._stop_sets.clear()
        for row, request in enumerate(requests, first):
            sampling, done = request.sampling, len(request.output_ids)
            length = len(request.prompt) + done
            self._rows[row] = (
                request.tokens[-1], length - 1, done, sampling.max_new_tokens, sampling.top_k, sampling.seed,
                self._stop_sets.index(sampling.stop_ids), sampling.temperature, sampling.top_p, sampling.min_p,
            )  # fmt: skip
            if done:
                self._widen(done)
                self._tokens[row, :done], self._log_probs[row, :done] = request.output_ids, request.log_probs
        self.requests.extend(requests)
        return slice(first, len(self))

    def sampling(self, rows: slice) -> SamplingBatch:
        """Settings for drawing the next token of `rows`."""
        part = self._rows[rows]
        return SamplingBatch(
            np.ascontiguousarray(part["temperature"]),
            part["top_p"],
            part["top_k"],
            part["min_p"],
            part["seed"],
            part["position"] + 1,
        )

    def record(self, rows: slice, tokens: Tokens, log_probs: LogProbs) -> dict[int, dict[str, Any]]:
        """Append one drawn token per row; finish reasons of the rows that end with it. Stopping comes before length."""
        part = self._rows[rows]
        index, column = np.arange(rows.start, rows.stop), part["generated"]
        self._widen(int(column.max()) + 1)
        self._tokens[index, column], self._log_probs[index, column] = tokens, log_probs
        part["token"] = tokens
        part["position"] += 1
        part["generated"] += 1
        stop = self._stop_sets.contains(part["stop_set"], tokens)
        full = part["generated"] >= part["max_new_tokens"]
        broken = ~np.isfinite(log_probs)
        ended = np.flatnonzero(stop | full | broken)
        return {
            rows.start + int(i): _reason(bool(broken[i]), bool(stop[i]), int(tokens[i]), int(part["max_new_tokens"][i]))
            for i in ended
        }

    def cached(self, row: int) -> Tokens:
        """Tokens of a row that are in the cache: all but the last one, int64 [T - 1]."""
        output = self._tokens[row, : self._rows["generated"][row]]
        return np.concatenate((self.requests[row].prompt, output))[:-1]

    def generated(self, row: int) -> int:
        """Output tokens of a row so far."""
        return int(self._rows["generated"][row])

    def release(self, rows: Rows) -> tuple[Rows, Rows]:
        """Hand their output to the requests of `rows` and drop them; the last rows move into the holes.

        Returns:
            (destinations, sources): cache slots that must be moved likewise, int64 [M] each.
        """
        for row in rows:
            request, done = self.requests[row], int(self._rows["generated"][row])
            request.output_ids = self._tokens[row, :done].copy()
            request.log_probs = self._log_probs[row, :done].copy()
        left = len(self) - len(rows)
        gone = np.zeros(len(self), bool)
        gone[rows] = True
        destinations, sources = np.flatnonzero(gone[:left]), np.flatnonzero(~gone[left:]) + left
        width = int(self._rows["generated"][sources].max(initial=0))
        self._rows[destinations] = self._rows[sources]
        self._tokens[destinations, :width] = self._tokens[sources, :width]
        self._log_probs[destinations, :width] = self._log_probs[sources, :width]
        for destination, source in zip(destinations, sources, strict=True):
            self.requests[destination] = self.requests[source]
        del self.requests[left:]
        return destinations, sources

    def _widen(self, columns: int) -> None:
        """Room for `columns` output tokens; doubling keeps the copies linear in the tokens."""
        have = self._tokens.shape[1]
        if columns > have:
            grown = ((0, 0), (0, max(columns, 2 * have) - have))
            self._tokens, self._log_probs = np.pad(self._tokens, grown), np.pad(self._log_probs, grown)


class _StopSets:
    """Distinct sets of stop ids as rows of one table, so that a whole batch is tested at once."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.clear()

    def clear(self) -> None:
        self._index: dict[frozenset[int], int] = {}
        self._table = np.zeros((0, self._vocab_size), bool)

    def index(self, ids: frozenset[int]) -> int:
        """Row of this set, made if it is new."""
        if ids not in self._index:
            self._index[ids] = len(self._table)
            self._table = np.pad(self._table, ((0, 1), (0, 0)))
            self._table[-1, list(ids)] = True
        return self._index[ids]

    def contains(self, sets: Rows, tokens: Tokens) -> NDArray[np.bool_]:
        """Whether tokens[i] is in set sets[i]."""
        return self._table[sets, tokens]


def _reason(broken: bool, stop: bool, token: int, max_new_tokens: int) -> dict[str, Any]:
    if broken:
        return failed("the model computed a log-prob that is not finite; do its weights hold NaN or infinite values?")
    return stopped(token) if stop else out_of_length(max_new_tokens)
