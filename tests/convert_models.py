"""Random Hugging Face directories of any small shape, made from a family's table alone; holds no tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.config import HfConfig, read_hf_config
from megatron_rl.weights import safetensors_file
from megatron_rl.weights.convert import torch_dist
from megatron_rl.weights.convert.actions import Conversion
from megatron_rl.weights.convert.job import Outcome
from megatron_rl.weights.families import family_of


def silent(size: int) -> None:
    """Nobody is told how far a conversion is."""


def convert(plan: Conversion, allow_nan: bool = False) -> Outcome:
    """Run a plan."""
    return plan.run(silent, allow_nan)


def record_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every read of numbers from now on; the directories of archives do not count."""
    found: list[int] = []
    original = safetensors_file.read_elements

    def recording(
        file: Path, offset: int, first: int, count: int, dtype: torch.dtype, more_follows: bool = True
    ) -> torch.Tensor:
        if dtype.is_floating_point:
            found.append(count * dtype.itemsize)
        return original(file, offset, first, count, dtype, more_follows)

    for module in (safetensors_file, torch_dist):
        monkeypatch.setattr(module, "read_elements", recording)
    return found


def write_config(path: Path, **settings: Any) -> HfConfig:
    """config.json of a tiny Llama, or of what `settings` make of it."""
    path.mkdir(parents=True)
    described = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": 50,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "sliding_window": None,
        "torch_dtype": "float32",
    } | settings
    (path / "config.json").write_text(json.dumps(described))
    (path / "generation_config.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    tokens = {f"t{i}": i for i in range(described["vocab_size"])}
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))
    return read_hf_config(path)


def write_model(
    path: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any
) -> dict[str, torch.Tensor]:
    """A directory with config, tokenizer and all tensors of the model in one safetensors file; returns these."""
    hf, generator = write_config(path, **settings), torch.Generator().manual_seed(seed)
    shapes = family_of(hf).hf_shapes(hf)
    tensors = {name: torch.randn(*shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return tensors


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, by its path there."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
