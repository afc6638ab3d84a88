"""The decoder whose kernels run at one shape only, so that a sequence's bits do not depend on what runs beside it.

CPU kernels choose their blocking, and with it the order of their sums, by the shape of the operands: a matrix product
of 3 rows rounds differently than one of 16. Here a decoding step always has `max_slots` rows (idle ones compute a token
that nobody reads) and attends to `max_length` entries, and prompts go through in chunks of [ROWS, CHUNK] tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .decoder import Decoder
from .forward import ForwardPass, masked_attention, visible_up_to
from .kv_cache import KVCache, KVShape
from .request import Tokens

ROWS = 16
"""Prompts of a prefill pass. With fewer than 16 rows kernels treat the rows of one call unequally."""
CHUNK = 16
"""Tokens of a prompt per prefill pass."""


class FixedShapeDecoder(Decoder):
    """Same results as `Decoder` up to rounding. `max_slots` and `max_length` are rounded up to multiples of 16.

    Raises:
        ValueError: the cache of this fixed size does not fit into `budget` bytes.
    """

    def __init__(self, forward: ForwardPass, max_slots: int, max_length: int, budget: int) -> None:
        slots, length = _round_up(max(max_slots, ROWS), ROWS), _round_up(max_length, CHUNK)
        super().__init__(forward, slots, length, budget)
        needed = self.cache.shape.bytes_for(slots, length)
        if needed > budget:
            raise ValueError(
                f"deterministic: {slots} slots of {length} tokens need {needed / 2**30:.1f} GiB of keys and values, "
                f"{budget / 2**30:.1f} GiB are allowed; lower max_running_requests or context_length"
            )
        self._scratch = KVCache(KVShape(**{**vars(self.cache.shape), "max_slots": ROWS}), budget)
        self.flush()

    def flush(self) -> None:
        """Forget all keys and values."""
        for cache in (self.cache, self._scratch):
            cache.clear()
            cache.reserve(cache.shape.max_slots, cache.shape.max_length, 0)

    def prefill(self, prompts: Sequence[Tokens], slots: Sequence[Sequence[int]], live: int) -> torch.Tensor:
        """See `Decoder.prefill`."""
        logits = torch.empty(len(prompts), self.forward.vocab_size, dtype=self.forward.dtype)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for first in range(0, len(order), ROWS):
            part = order[first : first + ROWS]
            hidden = self._prefill_rows([prompts[i] for i in part])
            logits[torch.tensor(part)] = self.forward.logits(hidden)[: len(part)]
            self._copy_to_slots([slots[i] for i in part], max(len(prompts[i]) for i in part))
        return logits

    def _prefill_rows(self, prompts: list[Tokens]) -> torch.Tensor:
        """Last hidden states [ROWS, hidden]; keys and values are left in the scratch cache."""
        chunks = -(-max(map(len, prompts)) // CHUNK)
        padded = np.zeros((ROWS, chunks * CHUNK), np.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        last = torch.zeros(ROWS, self.forward.model.config.hidden_size, dtype=self.forward.dtype)
        for chunk in range(chunks):
            hidden = self._prefill_chunk(torch.from_numpy(padded[:, chunk * CHUNK : (chunk + 1) * CHUNK]), chunk)
            for row, prompt in enumerate(prompts):
                if (len(prompt) - 1) // CHUNK == chunk:
                    last[row] = hidden[row, (len(prompt) - 1) % CHUNK]
        return last

    def _prefill_chunk(self, tokens: torch.Tensor, chunk: int) -> torch.Tensor:
        begin, end = chunk * CHUNK, (chunk + 1) * CHUNK
        positions = torch.arange(begin, end)[None]
        mask = visible_up_to(positions, self._scratch.length, self.forward.dtype)

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            self._scratch.keys[layer][:, :, begin:end] = keys
            self._scratch.values[layer][:, :, begin:end] = values
            return masked_attention(queries, self._scratch.keys[layer], self._scratch.values[layer], mask)

        return self.forward.hidden_states(tokens, positions, attend)

    def wipe(self, slots: NDArray[np.int64]) -> None:
        """See `Decoder.wipe`; whichever scratch rows the prompts went through are wiped with them."""
        super().wipe(slots)
        self._scratch.zero(torch.arange(ROWS))

    def _copy_to_slots(self, slots: list[Sequence[int]], length: int) -> None:
        targets = torch.tensor([slot for copies in slots for slot in copies])
        sources = torch.from_numpy(np.repeat(np.arange(len(slots)), [len(copies) for copies in slots]))
        for layer in range(len(self.cache.keys)):
            self.cache.keys[layer][targets, :, :length] = self._scratch.keys[layer][sources, :, :length]
            self.cache.values[layer][targets, :, :length] = self._scratch.values[layer][sources, :, :length]

    def decode(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> torch.Tensor:
        """See `Decoder.decode`; logits of all slots are computed and those of live ones returned."""
        live, slots = len(tokens), self.cache.slots
        all_tokens, all_positions = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        all_tokens[:live], all_positions[:live] = tokens, positions
        return self._step(all_tokens, all_positions, self.cache.length)[:live]


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
