"""The router of expert layers: Megatron's, which here never changes how it chooses by itself; no replay here."""

from __future__ import annotations

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class FrozenBiasRouter(TopKRouter):
    """Megatron's router; its bias for choosing, where a model has one, stays as it was loaded.

    Megatron counts the tokens of every expert in order to move that bias, with a function compiled at its first use.
    """

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count nothing."""
