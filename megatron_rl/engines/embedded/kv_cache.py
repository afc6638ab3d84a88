"""Memory for the keys and values of the running sequences, one slot each; which sequence owns a slot is not known here.

Slots 0 .. live - 1 are in use: whoever frees one moves the last into the hole, so that a step reads one dense block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LENGTH_BLOCK = 64


@dataclass(frozen=True)
class KVShape:
    """What a token occupies, and the limits."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    max_slots: int
    max_length: int

    def bytes_for(self, slots: int, length: int) -> int:
        """Bytes of keys and values of `slots` sequences of `length` tokens, lengths rounded up to blocks."""
        rounded = min(-(-length // LENGTH_BLOCK) * LENGTH_BLOCK, self.max_length)
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize * slots * rounded


class KVCache:
    """Keys and values, per layer [slots, kv_heads, length, head_dim]; grows geometrically while `budget` bytes allow.

    Never read memory is zero, never uninitialised: masked positions are multiplied by 0, and 0 * NaN would spread.
    """

    def __init__(self, shape: KVShape, budget: int) -> None:
        self.shape, self._budget = shape, budget
        self.slots = self.length = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self.slots = self.length = 0
        self.keys = [self._empty(0, 0) for _ in range(self.shape.num_layers)]
        self.values = [self._empty(0, 0) for _ in range(self.shape.num_layers)]

    def reserve(self, slots: int, length: int, live: int) -> None:
        """Make room for `slots` sequences of `length` tokens, keeping what the first `live` slots hold."""
        if slots <= self.slots and length <= self.length:
            return
        rounded = min(-(-length // LENGTH_BLOCK) * LENGTH_BLOCK, self.shape.max_length)
        new_slots = self.slots if slots <= self.slots else min(max(slots, 2 * self.slots), self.shape.max_slots)
        new_length = self.length
        if length > self.length:
            new_length = min(max(rounded, self.length * 3 // 2), self.shape.max_length)
        if self.shape.bytes_for(new_slots, new_length) > self._budget:
            new_slots, new_length = slots, rounded
        kept = min(self.length, new_length)
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = self._empty(new_slots, new_length)
                tensors[layer][:live, :, :kept] = old[:live, :, :kept]
        self.slots, self.length = new_slots, new_length

    def entries(self, positions: torch.Tensor) -> torch.Tensor:
        """Where token `positions[i]` of slot i lies, int64 [slots * kv_heads], in a layer seen as [-1, head_dim]."""
        heads = self.shape.num_kv_heads
        first = torch.arange(len(positions) * heads).view(-1, heads) * self.length
        return (first + positions[:, None]).flatten()

    def move(self, destinations: torch.Tensor, sources: torch.Tensor, length: int) -> None:
        """Copy the first `length` tokens of slots `sources` into slots `destinations` (int64 [M], disjoint)."""
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[destinations, :, :length] = tensor[sources, :, :length]

    def save(self, slot: int, length: int) -> torch.Tensor:
        """A copy of the first `length` tokens of a slot, [2 * layers, kv_heads, length, head_dim]."""
        return torch.stack([tensor[slot, :, :length] for tensor in (*self.keys, *self.values)])

    def restore(self, slot: int, saved: torch.Tensor) -> None:
        """Write what `save` returned into a slot; there is room for it."""
        for tensor, part in zip((*self.keys, *self.values), saved, strict=True):
            tensor[slot, :, : part.shape[1]] = part

    def zero(self, slots: torch.Tensor) -> None:
        """Wipe slots whose content must not meet a 0 of anyone's mask (NaN)."""
        for tensor in (*self.keys, *self.values):
            tensor[slots] = 0.0

    def _empty(self, slots: int, length: int) -> torch.Tensor:
        shape = self.shape
        return torch.zeros(slots, shape.num_kv_heads, length, shape.head_dim, dtype=shape.dtype)
