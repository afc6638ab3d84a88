"""The decoder whose kernels run at one shape only: a token's bits depend on the tokens before it and nothing else.

CPU kernels choose their blocking, and with it the order of their sums, by the shape of the operands: a matrix product
of 3 rows rounds differently than one of 16. Here every pass, of prompts and of decoding, multiplies `max_slots` rows
(idle ones compute a token that nobody reads), and every token attends to `max_length` entries by itself. What a
sequence gets does not depend on what runs beside it, nor on whether a token was decoded, or computed again as part of a
longer prompt: a response that is generated in segments is the one that is generated at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .decoder import Decoder, Reach
from .forward import ForwardPass, masked_attention, visible_up_to
from .kv_cache import ROUTE, KVCache, KVShape
from .request import Tokens

ROWS = 16
"""Prompts of a prefill pass. With fewer than 16 rows kernels treat the rows of one call unequally."""
LENGTH_STEP = 16


class FixedShapeDecoder(Decoder):
    """Same results as `Decoder` up to rounding. `max_slots` and `max_length` are rounded up to multiples of 16.

    Raises:
        ValueError: the cache of this fixed size does not fit into `budget` bytes.
    """

    def __init__(
        self, forward: ForwardPass, max_slots: int, max_length: int, budget: int, routes: bool = False
    ) -> None:
        slots, length = _round_up(max(max_slots, ROWS), ROWS), _round_up(max_length, LENGTH_STEP)
        super().__init__(forward, slots, length, budget, routes)
        forward.fixed_shapes = True
        needed = self.cache.shape.bytes_for(slots, length)
        if needed > budget:
            raise ValueError(
                f"deterministic: {slots} slots of {length} tokens need {needed / 2**30:.1f} GiB of keys and values, "
                f"{budget / 2**30:.1f} GiB are allowed; lower max_running_requests or context_length"
            )
        self._chunk = slots // ROWS  # tokens of each prompt in a pass
        scratch_length = _round_up(length, self._chunk)
        self._scratch = KVCache(
            KVShape(**{**vars(self.cache.shape), "max_slots": ROWS, "max_length": scratch_length}), budget
        )
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
        """Last hidden states, in the first rows of [slots, hidden]; keys and values are left in the scratch cache."""
        chunk = self._chunk
        passes = -(-max(map(len, prompts)) // chunk)
        padded = np.zeros((ROWS, passes * chunk), np.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        last = torch.zeros(self.cache.slots, self.forward.model.config.hidden_size, dtype=self.forward.dtype)
        for first in range(0, passes * chunk, chunk):
            hidden = self._prefill_chunk(torch.from_numpy(padded[:, first : first + chunk]), first)
            for row, prompt in enumerate(prompts):
                if first < len(prompt) <= first + chunk:
                    last[row] = hidden[row, len(prompt) - 1 - first]
        return last

    def _prefill_chunk(self, tokens: torch.Tensor, first: int) -> torch.Tensor:
        """Hidden states [ROWS, chunk, hidden] of tokens [ROWS, chunk] at positions first, first + 1, ..."""
        positions = torch.arange(first, first + self._chunk)[None]
        masks = visible_up_to(positions, self.cache.length, self.forward.dtype)

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            all_keys, all_values = self._scratch.keys[layer], self._scratch.values[layer]
            all_keys[:, :, first : first + self._chunk] = keys
            all_values[:, :, first : first + self._chunk] = values
            seen = all_keys[:, :, : self.cache.length], all_values[:, :, : self.cache.length]
            one = [
                masked_attention(queries[:, :, i : i + 1], *seen, masks[:, :, i : i + 1]) for i in range(self._chunk)
            ]
            return torch.cat(one, dim=1)

        def routed(layer: int, experts: torch.Tensor) -> None:
            self._scratch.routes[layer][:, 0, first : first + self._chunk] = experts.to(ROUTE)

        return self.forward.hidden_states(tokens, positions, attend, self._if_kept(routed))

    def wipe(self, slots: NDArray[np.int64]) -> None:
        """See `Decoder.wipe`; whichever scratch rows the prompts went through are wiped with them."""
        super().wipe(slots)
        self._scratch.zero(torch.arange(ROWS))

    def _copy_to_slots(self, slots: list[Sequence[int]], length: int) -> None:
        targets = torch.tensor([slot for copies in slots for slot in copies])
        sources = torch.from_numpy(np.repeat(np.arange(len(slots)), [len(copies) for copies in slots]))
        pairs = zip(
            (*self.cache.keys, *self.cache.values, *self.cache.routes),
            (*self._scratch.keys, *self._scratch.values, *self._scratch.routes),
            strict=True,
        )
        for tensor, scratch in pairs:
            tensor[targets, :, :length] = scratch[sources, :, :length]

    def decode(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> torch.Tensor:
        """See `Decoder.decode`; logits of all slots are computed and those of live ones returned."""
        live, slots = len(tokens), self.cache.slots
        all_tokens, all_positions = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        all_tokens[:live], all_positions[:live] = tokens, positions
        whole = Reach(self.cache.length, self.cache.length)
        return self._step(all_tokens, all_positions, whole)[:live]


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
