"""The table of Qwen2 (dense): Llama with biases on q, k and v."""

from __future__ import annotations

from megatron_rl.weights.families.common import ATTENTION, MLP, QKV_BIAS, TOP
from megatron_rl.weights.mapping import Family

FAMILY = Family(model_type="qwen2", top=TOP, layer=ATTENTION + QKV_BIAS + MLP)
