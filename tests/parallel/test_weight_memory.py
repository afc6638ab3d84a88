"""Exporting weights takes the memory of two buckets, however large the model is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.launch import run_ranks
from tests.parallel.policy_setup import TP2, layout, make_config
from tests.tiny import tiny_model

pytestmark = pytest.mark.parallel

BUCKET_BYTES = 16 * 2**20
FIRST_TOUCHED = 8 * 2**20
"""Code, gloo's buffers and the like, which the first export uses for the first time."""
LAYERS = 8


def measure(path: Path, folder: Path) -> tuple[int, int, int]:
    """Bytes of this rank's weights, extra memory while they are written, and files on the disk."""
    from megatron_rl.config import read_hf_config
    from megatron_rl.policy import distributed
    from megatron_rl.policy.model import build_model
    from megatron_rl.weights.load import load_hf_weights
    from megatron_rl.weights.version_dir import write_version

    cfg = make_config(path, TP2)
    with layout(cfg):
        hf = read_hf_config(path)
        chunks = build_model(hf, cfg.model, cfg.parallel)
        load_hf_weights(chunks, hf, path)
        size = sum(p.numel() * p.element_size() for chunk in chunks for p in chunk.parameters())
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        before = kilobytes("VmRSS")
        version = write_version(chunks, hf, path, folder / "v000001", bucket_bytes=BUCKET_BYTES)
        extra = 1024 * (kilobytes("VmHWM") - before)
    distributed.shutdown()
    return size, extra, len(list(version.glob("*.safetensors")))


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def test_a_version_is_written_in_the_memory_of_two_buckets(tmp_path: Path) -> None:
    path = tiny_model(
        tmp_path / "m",
        layers=LAYERS,
        vocab_size=300,
        hidden_size=512,
        intermediate_size=2048,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )
    for size, extra, files in run_ranks(2, measure, path, tmp_path):
        assert size > 3 * BUCKET_BYTES  # of one rank: twice that leaves
        assert extra < 2 * BUCKET_BYTES + FIRST_TOUCHED
        assert files > 6
