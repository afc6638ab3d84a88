"""Which quantised models and engines fit together, said before anything starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_rl.config.engine import EngineConfig
from megatron_rl.config.quantised import quantisation_problems
from megatron_rl.weights.companions import copy_companions
from megatron_rl.weights.fp8 import FP8, quantization_config
from tests.least import least

IN_BLOCKS = quantization_config()


@pytest.mark.parametrize(
    ("quantisation", "dtype", "message"),
    [
        (None, "model", None),
        (None, "bfloat16", None),
        (IN_BLOCKS, "float8", None),
        (IN_BLOCKS, "model", r"engine.dtype=model, but model.path holds blocks of fp8.*use engine.dtype=float8, or"),
        (None, "float8", r"engine.dtype=float8, but model.path is not in fp8.*convert cast --dtype fp8"),
        ({"quant_method": "awq"}, "bfloat16", r"quant_method=awq.*only fp8 in blocks of \[128, 128\] can be read"),
        (IN_BLOCKS | {"weight_block_size": [64, 64]}, "float8", r"weight_block_size=\[64, 64\]"),
    ],
)
def test_what_a_model_is_stored_in_and_what_engines_take(
    quantisation: dict[str, Any] | None, dtype: str, message: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantisation} if quantisation else {}))
    cfg = least(model={"path": str(tmp_path)}, engine={"kind": "sglang", "dtype": dtype})
    problems = list(quantisation_problems(cfg))
    assert len(problems) == (message is not None)
    assert message is None or re.search(message, problems[0])


def test_the_embedded_engine_takes_no_fp8() -> None:
    with pytest.raises(ValidationError, match="dtype=float8 needs kind: sglang"):
        EngineConfig(dtype="float8")


@pytest.mark.parametrize(
    ("dtype", "weights", "computes"),
    [
        ("model", "float32", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float8", "float8_e4m3fn", "bfloat16"),
    ],
)
def test_engines_of_a_float32_trainer(dtype: Any, weights: str, computes: str) -> None:
    engine = EngineConfig(kind="sglang", dtype=dtype)
    assert (engine.weights_dtype("float32"), engine.compute_dtype("float32")) == (weights, computes)


def test_a_copy_says_what_its_own_weights_are(tmp_path: Path) -> None:
    import torch

    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", "quantization_config": {"x": 1}}))
    copy_companions(source, tmp_path / "fp8", FP8)
    copy_companions(source, tmp_path / "plain", torch.float32)
    described = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("fp8", "plain")]
    assert described[0] == {"torch_dtype": "bfloat16", "quantization_config": IN_BLOCKS}
    assert described[1] == {"torch_dtype": "float32"}
