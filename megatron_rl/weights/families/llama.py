"""The table of Llama (dense): grouped-query attention, no biases unless `attention_bias`."""

from __future__ import annotations

from megatron_rl.weights.families.common import ATTENTION, MLP, QKV_BIAS, TOP
from megatron_rl.weights.mapping import Family

FAMILY = Family(model_type="llama", top=TOP, layer=ATTENTION + QKV_BIAS + MLP)
