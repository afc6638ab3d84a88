"""The registry of model families: one file per family holds its table; how a table is used is in `weights.mapping`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.weights import WeightsError
from megatron_rl.weights.families import (
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)

if TYPE_CHECKING:
    from megatron_rl.config import HfConfig
    from megatron_rl.weights.mapping import Family

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (llama, mistral, qwen2, qwen3, qwen3_moe, mixtral, deepseek_v2, deepseek_v3, glm4_moe)
}


def family_of(hf: HfConfig) -> Family:
    """The table for a model.

    Raises:
        WeightsError: no family has this model_type.
    """
    if hf.model_type not in FAMILIES:
        raise WeightsError(
            f"config.json: model_type={hf.model_type!r} has no weight table; one of {', '.join(sorted(FAMILIES))}, "
            "or add a file to megatron_rl/weights/families"
        )
    return FAMILIES[hf.model_type]
