"""Sizes of tiny models that Transformer Engine's kernels take; holds no tests."""

from __future__ import annotations

from typing import Any

from tests.tiny import Family

WITH_EXPERTS: dict[Family, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 64, "moe_intermediate_size": 128},
    "mixtral": {"head_dim": 64, "intermediate_size": 128},
    "glm4_moe": {"head_dim": 64, "moe_intermediate_size": 128},
    "deepseek_v3": {
        "moe_intermediate_size": 128,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}
"""Of the families with experts, beside the hidden size and the number of heads."""
