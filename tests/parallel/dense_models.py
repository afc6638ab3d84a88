"""Tiny models without experts, of every family and rotation; layouts of four ranks to try them in. Holds no tests."""

from __future__ import annotations

from typing import Any

from tests.parallel.policy_setup import DP2, DP4, PP2, SP, TP2, VPP2

RANKS = 4
VOCAB_SIZE = 320
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3"},
    "qwen3-tied": {"family": "qwen3", "tied": True},
    "qwen2": {"family": "qwen2"},
    "llama": {"family": "llama", "rope_parameters": LLAMA3_ROPE},
    "mistral": {"family": "mistral", "rope_parameters": LINEAR_ROPE},
    "qwen2-yarn": {"family": "qwen2", "rope_parameters": YARN_ROPE, "tied": True},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": DP4,
    "tp2": TP2 | DP2,
    "pp2": PP2 | DP2,
    "tp2-pp2": TP2 | PP2,
    "tp2-sp-full": TP2 | DP2 | SP | {"recompute": "full"},
    "tp2-pp2-sp-selective": TP2 | PP2 | SP | {"recompute": "selective"},
    "tp2-pp2-vpp2": TP2 | VPP2,
    "tp4": {"tensor_model_parallel_size": 4},
}
PLAIN = ("tp1", "tp2", "pp2", "tp2-pp2", "tp4")
"""What a layout does beyond these does not depend on a family's names. At TP 4 two ranks share a query group."""
