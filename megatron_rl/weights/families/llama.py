"""The table of Llama (dense): grouped-query attention, no biases."""

from __future__ import annotations

from megatron_rl.weights.families.common import ATTENTION, MLP, TOP
from megatron_rl.weights.mapping import Family

FAMILY = Family(model_type="llama", top=TOP, layer=ATTENTION + MLP)
