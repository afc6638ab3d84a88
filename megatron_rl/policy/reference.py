"""The frozen reference policy: weights on the host that trade places with the policy's, and its cached log-probs.

No second model exists on the device. `swapped_in` exchanges parameter by parameter, in place, so the views that the
gradient buffers and the distributed optimizer hold stay valid, and the policy's weights come back bit by bit.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from megatron_rl.policy.batch import SequenceBatch

CACHE_TOKENS = 1 << 24
"""Default bound of the log-prob cache, in tokens (64 MiB)."""


class ReferenceWeights:
    """A host copy of the parameters of `chunks`, taken now; as large as this rank's share of the model."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._host = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]
        if torch.cuda.is_available():
            self._host = [tensor.pin_memory() for tensor in self._host]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the block the model computes with the reference weights; after it, also on an error, with its own."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, host in zip(self._parameters, self._host, strict=True):
            held = parameter.detach().clone()  # one parameter at a time: the only extra device memory
            parameter.copy_(host)
            host.copy_(held)


class LogProbCache:
    """Log-probs by sample id and temperature, at most `max_tokens` of them; the least recently used go first.

    Valid for one set of reference weights: make a new cache when they change.
    """

    def __init__(self, max_tokens: int = CACHE_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._entries: OrderedDict[tuple[str, float, int], np.ndarray] = OrderedDict()

    def get(self, batch: SequenceBatch) -> np.ndarray | None:
        """float32 [T] aligned with `batch.tokens` when every sequence is known, else None."""
        keys = _keys(batch)
        if any(key not in self._entries for key in keys):
            return None
        for key in keys:
            self._entries.move_to_end(key)
        return np.concatenate([self._entries[key] for key in keys]) if keys else np.zeros(0, dtype=np.float32)

    def put(self, batch: SequenceBatch, log_probs: np.ndarray) -> None:
        """Remember `log_probs` [T] of every sequence of `batch`."""
        for key, (start, end) in zip(_keys(batch), itertools.pairwise(batch.offsets), strict=True):
            values = log_probs[start:end]
            self._tokens += values.size - len(self._entries.pop(key, ()))
            self._entries[key] = values.copy()
        while self._tokens > self._max_tokens:
            self._tokens -= self._entries.popitem(last=False)[1].size


def _keys(batch: SequenceBatch) -> list[tuple[str, float, int]]:
    return list(zip(batch.sample_ids, batch.temperature.tolist(), batch.lengths.tolist(), strict=True))
