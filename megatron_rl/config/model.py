"""Section `model:`, which network is trained and in what number format; its layout over ranks is `parallel:`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import Section


class ModelConfig(Section):
    """The policy, given as a Hugging Face directory."""

    path: str
    """Hugging Face directory with config.json, *.safetensors and the tokenizer files."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Format of parameters and activations. Master weights and the loss are fp32 in either case."""
    make_vocab_size_divisible_by: int = Field(128, ge=1)
    """The embedding is padded to a multiple of this times tensor_model_parallel_size; padding is never predicted."""
