"""What the model's config.json says of quantised weights, and which engines can take them; weights are not read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .schema import Config

BLOCK = [128, 128]


def stored_in_blocks(model: str | Path) -> bool:
    """Whether matrices are blocks of 128 x 128 fp8 numbers with scales, as DeepSeek-V3 is published."""
    found = _quantisation(model)
    return found.get("quant_method") == "fp8" and found.get("weight_block_size") == BLOCK


def quantisation_problems(cfg: Config) -> Iterator[str]:
    """A quantised model that cannot be read, and engines that would not understand what they get."""
    path, in_blocks, dtype = cfg.model.path, stored_in_blocks(cfg.model.path), cfg.engine.dtype
    if (found := _quantisation(path)) and not in_blocks:
        yield (
            f"model.path: its config.json says quant_method={found.get('quant_method')}, "
            f"weight_block_size={found.get('weight_block_size')}; of quantised models only fp8 in blocks of "
            f"{BLOCK} can be read; use one that is not quantised"
        )
    if in_blocks and dtype != "float8":
        yield (
            f"engine.dtype={dtype}, but model.path holds blocks of fp8: engines start with these and take nothing "
            "else; use engine.dtype=float8, or `megatron-rl convert cast --dtype bf16` and that copy as model.path"
        )
    if dtype == "float8" and not found:
        yield (
            "engine.dtype=float8, but model.path is not in fp8: engines start with its weights and keep their format; "
            "use `megatron-rl convert cast --dtype fp8` and that copy as model.path (trainers read it as well)"
        )


def _quantisation(model: str | Path) -> dict[str, Any]:
    described = json.loads((Path(model) / "config.json").read_text())
    found = described.get("quantization_config")
    return found if isinstance(found, dict) else {}
