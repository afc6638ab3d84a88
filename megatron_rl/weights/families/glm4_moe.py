"""The table of GLM-4-MoE: Llama's attention, with biases and norms where the config says so, and DeepSeek-V3's MLPs.

Layers that predict tokens further on, which checkpoints hold behind the last one, have no place in the table.
"""

from __future__ import annotations

from megatron_rl.weights.families.common import ATTENTION, DENSE_MLP, EXPERTS, MLP_NORM, QK_NORM, QKV_BIAS, ROUTER, TOP
from megatron_rl.weights.families.deepseek_v3 import EXPERT_BIAS, SHARED_EXPERTS
from megatron_rl.weights.mapping import Family

FAMILY = Family(
    model_type="glm4_moe",
    top=TOP,
    layer=(
        *ATTENTION,
        *QKV_BIAS,
        *QK_NORM,
        MLP_NORM,
        *DENSE_MLP,
        *ROUTER,
        EXPERT_BIAS,
        *SHARED_EXPERTS,
        *EXPERTS,
    ),
)
