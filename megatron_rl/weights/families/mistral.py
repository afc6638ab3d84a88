"""The table of Mistral (dense): Llama's tensors; a sliding window, where a checkpoint has one, is refused elsewhere."""

from __future__ import annotations

from megatron_rl.weights.families.common import ATTENTION, MLP, TOP
from megatron_rl.weights.mapping import Family

FAMILY = Family(model_type="mistral", top=TOP, layer=ATTENTION + MLP)
