"""The model with its KV cache: prefill of prompts, one decoding step of all sequences; no sampling, no requests.

`Decoder` shrinks every shape to what is live. `FixedShapeDecoder` (in `fixed_shapes`) keeps them all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .forward import ForwardPass, Routed, causal_attention, ignore_routes, masked_attention, visible_up_to
from .kv_cache import ROUTE, KVCache, KVShape, Saved
from .request import LogProbs, Tokens

PREFILL_TOKENS = 8192
"""Most tokens, padding included, of one prefill pass: bounds its activations."""
PASS_TOKENS = 256
"""Padding that costs as much as another pass: longer prompts then get one of their own."""
KV_STEP = 16
"""The attended length is rounded up to this: fewer distinct shapes, no measurable waste."""
SPLIT_COST = 2**16
"""Numbers of the cache that must not be read for nothing, to make up for a second call of attention."""
GATHER_COST = 3
"""Reading a slot's entries from a copy, in terms of reading them in place."""


class Reach(NamedTuple):
    """How many cache entries a decoding step attends to: the first `near`, rows `far` (int64) the first `length`."""

    near: int
    length: int
    far: torch.Tensor | None = None


class Decoder:
    """Sequences occupy cache slots 0 .. live - 1; the caller keeps them dense with `move`.

    Args:
        forward: the model.
        max_slots: sequences decoded at once.
        max_length: tokens of the longest sequence.
        budget: bytes for keys and values.
        routes: whether to keep which experts tokens were routed to.
    """

    def __init__(
        self, forward: ForwardPass, max_slots: int, max_length: int, budget: int, routes: bool = False
    ) -> None:
        self.forward = forward
        self.budget = budget
        shape = len(forward.layers), forward.num_kv_heads, forward.head_dim, forward.dtype, max_slots, max_length
        kept = (len(forward.moe_layers), forward.top_k) if routes else (0, 0)
        self.cache = KVCache(KVShape(*shape, *kept), budget)

    def prefill(self, prompts: Sequence[Tokens], slots: Sequence[Sequence[int]], live: int) -> torch.Tensor:
        """Compute each prompt once and fill all of its slots.

        Args:
            prompts: distinct token sequences, int64 [S_i].
            slots: for each prompt, the slots (>= live) that are to continue it.
            live: slots whose content must survive.

        Returns:
            logits [prompts, V] after each prompt's last token.
        """
        self.cache.reserve(max(max(s) for s in slots) + 1, max(map(len, prompts)) + 1, live)
        logits = torch.empty(len(prompts), self.forward.vocab_size, dtype=self.forward.dtype)
        for part in _parts(prompts):
            hidden = self._prefill_part([prompts[i] for i in part], [slots[i] for i in part])
            logits[torch.tensor(part)] = self.forward.logits(hidden)
        return logits

    def _prefill_part(self, prompts: list[Tokens], slots: list[Sequence[int]]) -> torch.Tensor:
        """Last hidden states [prompts, hidden] of one right-padded pass."""
        lengths = np.array([len(p) for p in prompts])
        padded = np.zeros((len(prompts), lengths.max()), np.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        targets = torch.tensor([slot for copies in slots for slot in copies])
        sources = torch.from_numpy(np.repeat(np.arange(len(prompts)), [len(copies) for copies in slots]))
        width = padded.shape[1]

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            self.cache.keys[layer][targets, :, :width] = keys[sources]
            self.cache.values[layer][targets, :, :width] = values[sources]
            return causal_attention(queries, keys, values)

        def routed(layer: int, experts: torch.Tensor) -> None:
            self.cache.routes[layer][targets, 0, :width] = experts[sources].to(ROUTE)

        positions = torch.arange(width)[None]
        hidden = self.forward.hidden_states(torch.from_numpy(padded), positions, attend, self._if_kept(routed))
        return hidden[torch.arange(len(prompts)), torch.from_numpy(lengths - 1)]

    def decode(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> torch.Tensor:
        """One step: append tokens int64 [live] at positions [live] of slots 0 .. live - 1; logits [live, V]."""
        longest = int(positions.max()) + 1
        self.cache.reserve(len(tokens), longest, len(tokens))
        return self._step(tokens, positions, self._reach(positions, longest))

    def _reach(self, positions: NDArray[np.int64], longest: int) -> Reach:
        """Let few long rows attend by themselves where that pays: the others would cost as much as they do."""
        length = min(-(-longest // KV_STEP) * KV_STEP, self.cache.length)
        ends = np.minimum(-(-(np.sort(positions) + 1) // KV_STEP) * KV_STEP, length)
        beyond = np.arange(len(ends) - 1, -1, -1)  # rows behind each one, in the order of their lengths
        read = len(ends) * ends + GATHER_COST * length * beyond
        near = int(ends[read.argmin()])
        saved = (len(ends) * length - int(read.min())) * self.forward.num_kv_heads * self.forward.head_dim
        if saved <= SPLIT_COST:
            return Reach(length, length)
        return Reach(near, length, torch.from_numpy(np.flatnonzero(positions >= near)))

    def _step(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], reach: Reach) -> torch.Tensor:
        rows, where, far = len(tokens), torch.from_numpy(positions), reach.far
        mask = visible_up_to(where[:, None], reach.near, self.forward.dtype)
        far_mask = None if far is None else visible_up_to(where[far, None], reach.length, self.forward.dtype)
        entries = self.cache.entries(where)

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            cached_keys, cached_values = self.cache.keys[layer], self.cache.values[layer]
            cached_keys.view(-1, self.forward.head_dim).index_copy_(0, entries, keys.flatten(0, 2))
            cached_values.view(-1, self.forward.head_dim).index_copy_(0, entries, values.flatten(0, 2))
            near = cached_keys[:rows, :, : reach.near], cached_values[:rows, :, : reach.near]
            attended = masked_attention(queries, *near, mask)
            if far is not None and far_mask is not None:
                whole = cached_keys[far, :, : reach.length], cached_values[far, :, : reach.length]
                attended[far] = masked_attention(queries[far], *whole, far_mask)
            return attended

        def routed(layer: int, experts: torch.Tensor) -> None:
            self.cache.routes[layer][torch.arange(rows), 0, where] = experts[:, 0].to(ROUTE)

        hidden = self.forward.hidden_states(
            torch.from_numpy(tokens)[:, None], where[:, None], attend, self._if_kept(routed)
        )
        return self.forward.logits(hidden[:, 0])

    def _if_kept(self, routed: Routed) -> Routed:
        return routed if self.cache.routes else ignore_routes

    def routes(self, slot: int, begin: int, end: int) -> NDArray[np.int32] | None:
        """Experts of the cached tokens [begin, end) of a slot, [end - begin, layers, top_k]; None unless they are kept.

        All layers of the model have an entry; those of layers without experts are 0.
        """
        if not self.cache.routes:
            return None
        found = np.zeros((end - begin, len(self.forward.layers), self.forward.top_k), np.int32)
        for layer, tensor in zip(self.forward.moe_layers, self.cache.routes, strict=True):
            found[:, layer] = tensor[slot, 0, begin:end].numpy()
        return found

    def fits(self, sequences: int, length: int) -> bool:
        """Whether the keys and values of so many sequences of this length are within the budget."""
        return self.cache.shape.bytes_for(sequences, length) <= self.budget

    def move(self, destinations: NDArray[np.int64], sources: NDArray[np.int64], length: int) -> None:
        """Copy slots; see `KVCache.move`."""
        self.cache.move(torch.from_numpy(destinations), torch.from_numpy(sources), length)

    def restore(self, saved: Sequence[Saved], live: int) -> None:
        """Write what `KVCache.save` returned into the slots from `live` on, keeping those before."""
        self.cache.reserve(live + len(saved), max(part.length for part in saved) + 1, live)
        for slot, part in enumerate(saved, live):
            self.cache.restore(slot, part)

    def wipe(self, slots: NDArray[np.int64]) -> None:
        """Zero slots that hold NaN."""
        self.cache.zero(torch.from_numpy(slots))

    def flush(self) -> None:
        """Forget all keys and values."""
        self.cache.clear()

    def prompt_log_probs(self, tokens: Tokens) -> LogProbs:
        """log_softmax(logits)[token] of tokens[1:], float32, at temperature 1; a pass of its own."""
        hidden = self.forward.hidden_states(
            torch.from_numpy(tokens)[None],
            torch.arange(len(tokens))[None],
            lambda _, q, k, v: causal_attention(q, k, v),
        )[0]
        found = np.empty(len(tokens) - 1, np.float32)
        for first in range(0, len(tokens) - 1, 512):  # logits of a whole long prompt would be GiBs
            last = min(first + 512, len(tokens) - 1)
            log_probs = torch.log_softmax(self.forward.logits(hidden[first:last]).float(), dim=-1)
            targets = torch.from_numpy(tokens[first + 1 : last + 1])
            found[first:last] = log_probs.gather(1, targets[:, None])[:, 0].numpy()
        return found


def _parts(prompts: Sequence[Tokens]) -> Iterator[list[int]]:
    """Indices of prompts that go through the model together: alike in length, PREFILL_TOKENS at most, or one."""
    part: list[int] = []
    tokens = 0
    for index in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
        tokens += len(prompts[index])
        padded = (len(part) + 1) * len(prompts[index])
        if part and (padded > PREFILL_TOKENS or padded - tokens > PASS_TOKENS):
            yield part
            part, tokens = [], len(prompts[index])
        part.append(index)
    yield part
