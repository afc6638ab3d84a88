"""The table of DeepSeek-V2: that of DeepSeek-V3 without the bias for choosing experts."""

from __future__ import annotations

from megatron_rl.weights.families.common import DENSE_MLP, EXPERTS, MLP_NORM, ROUTER, TOP
from megatron_rl.weights.families.deepseek_v3 import ATTENTION, SHARED_EXPERTS
from megatron_rl.weights.mapping import Family

FAMILY = Family(
    model_type="deepseek_v2",
    top=TOP,
    layer=(*ATTENTION, MLP_NORM, *DENSE_MLP, *ROUTER, *SHARED_EXPERTS, *EXPERTS),
)
