"""Exporting weights takes the memory of two buckets, however large the model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.launch import run_ranks
from tests.parallel.policy_setup import DP2, TP2, layout, make_config
from tests.tiny import Family, tiny_model

pytestmark = pytest.mark.parallel

BUCKET_BYTES = 16 * 2**20
FIRST_TOUCHED = 8 * 2**20
"""Code, gloo's buffers and the like, which the first export uses for the first time."""
LAYERS = 10
CASES: tuple[tuple[Family, dict[str, Any], dict[str, Any]], ...] = (
    ("qwen3", TP2, {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 64}),
    ("qwen3_moe", DP2 | {"expert_model_parallel_size": 2}, {"hidden_size": 256, "moe_intermediate_size": 512}),
)
"""Family, layout, sizes; the experts of the second are 120 MiB."""


def measure(paths: list[Path], folder: Path) -> list[tuple[int, int, int]]:
    """Bytes of this rank's weights, extra memory while they are written, and files on the disk, of every case."""
    from megatron_rl.config import read_hf_config
    from megatron_rl.policy import distributed
    from megatron_rl.policy.model import build_model
    from megatron_rl.weights.load import load_hf_weights
    from megatron_rl.weights.version_dir import write_version

    found = []
    for path, (family, parallel, _) in zip(paths, CASES, strict=True):
        cfg = make_config(path, parallel)
        with layout(cfg):
            hf = read_hf_config(path)
            chunks = build_model(hf, cfg.model, cfg.parallel)
            load_hf_weights(chunks, hf, path)
            size = sum(p.numel() * p.element_size() for chunk in chunks for p in chunk.parameters())
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
            before = kilobytes("VmRSS")
            version = write_version(chunks, hf, path, folder / family, bucket_bytes=BUCKET_BYTES)
            extra = 1024 * (kilobytes("VmHWM") - before)
            found.append((size, extra, len(list(version.glob("*.safetensors")))))
    distributed.shutdown()
    return found


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def test_a_version_is_written_in_the_memory_of_two_buckets(tmp_path: Path) -> None:
    paths = [
        tiny_model(tmp_path / f"model of {family}", family, layers=LAYERS, vocab_size=300, **sizes)
        for family, _, sizes in CASES
    ]
    for found in run_ranks(2, measure, paths, tmp_path):
        for size, extra, files in found:
            assert size > 3 * BUCKET_BYTES  # of one rank: twice that leaves
            assert extra < 2 * BUCKET_BYTES + FIRST_TOUCHED
            assert files > 6
