"""The table of Qwen3 (dense): Llama with a norm on every head's query and key."""

from __future__ import annotations

from megatron_rl.weights.families.common import ATTENTION, MLP, QK_NORM, TOP
from megatron_rl.weights.mapping import Family

FAMILY = Family(model_type="qwen3", top=TOP, layer=ATTENTION + QK_NORM + MLP)
