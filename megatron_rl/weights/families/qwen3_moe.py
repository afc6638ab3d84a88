"""The table of Qwen3 with experts: Qwen3's attention; in all or some layers a router and experts instead of an MLP."""

from __future__ import annotations

from megatron_rl.weights.families.common import ATTENTION, DENSE_MLP, EXPERTS, MLP_NORM, QK_NORM, ROUTER, TOP
from megatron_rl.weights.mapping import Family

FAMILY = Family(model_type="qwen3_moe", top=TOP, layer=(*ATTENTION, *QK_NORM, MLP_NORM, *DENSE_MLP, *ROUTER, *EXPERTS))
