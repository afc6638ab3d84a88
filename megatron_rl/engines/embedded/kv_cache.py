"""Memory for the keys and values of the running sequences, one slot each; which sequence owns a slot is not known here.

Beside a token's keys and values lies, where it is wanted, which experts it was routed to: one is as old as the other.

Slots 0 .. live - 1 are in use: whoever frees one moves the last into the hole, so that a step reads one dense block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

LENGTH_BLOCK = 64
ROUTE = torch.int16


@dataclass(frozen=True)
class KVShape:
    """What a token occupies, and the limits."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    max_slots: int
    max_length: int
    moe_layers: int = 0
    """Layers whose routes are kept."""
    top_k: int = 0

    def bytes_for(self, slots: int, length: int) -> int:
        """Bytes that `slots` sequences of `length` tokens take, lengths rounded up to blocks."""
        rounded = min(-(-length // LENGTH_BLOCK) * LENGTH_BLOCK, self.max_length)
        keys_values = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return (keys_values + self.moe_layers * self.top_k * ROUTE.itemsize) * slots * rounded


class Saved(NamedTuple):
    """What a slot held: keys and values [2 * layers, kv_heads, length, head_dim], routes [moe_layers, 1, length, k]."""

    keys_values: torch.Tensor
    routes: torch.Tensor | None

    @property
    def length(self) -> int:
        """Tokens."""
        return self.keys_values.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.keys_values.nbytes + (0 if self.routes is None else self.routes.nbytes)


class KVCache:
    """Keys and values, per layer [slots, kv_heads, length, head_dim]; grows geometrically while `budget` bytes allow.

    Routes are int16, per MoE layer [slots, 1, length, top_k].

    Never read memory is zero, never uninitialised: masked positions are multiplied by 0, and 0 * NaN would spread.
    """

    def __init__(self, shape: KVShape, budget: int) -> None:
        self.shape, self._budget = shape, budget
        self.clear()

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self.slots = self.length = 0
        shape = self.shape
        nothing = torch.zeros(0, shape.num_kv_heads, 0, shape.head_dim, dtype=shape.dtype)
        self.keys, self.values = [nothing] * shape.num_layers, [nothing] * shape.num_layers
        self.routes = [torch.zeros(0, 1, 0, shape.top_k, dtype=ROUTE)] * shape.moe_layers

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
        for tensors in (self.keys, self.values, self.routes):
            for layer, old in enumerate(tensors):
                tensors[layer] = old.new_zeros(new_slots, old.shape[1], new_length, old.shape[3])
                tensors[layer][:live, :, :kept] = old[:live, :, :kept]
        self.slots, self.length = new_slots, new_length

    def entries(self, positions: torch.Tensor) -> torch.Tensor:
        """Where token `positions[i]` of slot i lies, int64 [slots * kv_heads], in a layer seen as [-1, head_dim]."""
        heads = self.shape.num_kv_heads
        first = torch.arange(len(positions) * heads).view(-1, heads) * self.length
        return (first + positions[:, None]).flatten()

    def move(self, destinations: torch.Tensor, sources: torch.Tensor, length: int) -> None:
        """Copy the first `length` tokens of slots `sources` into slots `destinations` (int64 [M], disjoint)."""
        for tensor in (*self.keys, *self.values, *self.routes):
            tensor[destinations, :, :length] = tensor[sources, :, :length]

    def save(self, slot: int, length: int) -> Saved:
        """A copy of the first `length` tokens of a slot."""
        keys_values = torch.stack([tensor[slot, :, :length] for tensor in (*self.keys, *self.values)])
        routes = torch.stack([tensor[slot, :, :length] for tensor in self.routes]) if self.routes else None
        return Saved(keys_values, routes)

    def restore(self, slot: int, saved: Saved) -> None:
        """Write what `save` returned into a slot; there is room for it."""
        for tensor, part in zip((*self.keys, *self.values), saved.keys_values, strict=True):
            tensor[slot, :, : saved.length] = part
        for tensor, part in zip(self.routes, () if saved.routes is None else saved.routes, strict=True):
            tensor[slot, :, : saved.length] = part

    def zero(self, slots: torch.Tensor) -> None:
        """Wipe slots whose content must not meet a 0 of anyone's mask (NaN)."""
        for tensor in (*self.keys, *self.values):
            tensor[slots] = 0.0
