"""The benchmarks run from end to end and print both sides and their ratio; what the numbers are is not tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .runs import run_tool

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize("name", ["bench_step.py", "bench_engine.py", "bench_loss.py", "bench_convert.py"])
def test_help_says_what_is_compared(name: str) -> None:
    said = run_tool(name, "--help")
    assert "--runs" in said
    assert re.search("TRL's GRPOTrainer|transformers.generate|naive PyTorch|bare safetensors", said)


def test_engine_benchmark_prints_a_ratio_for_each_load() -> None:
    said = run_tool(
        "bench_engine.py",
        *["--runs", "1", "--groups", "2", "--group-size", "4", "--length", "8", "--mean", "4", "--longest", "16"],
    )
    for load in ("uniform: 8 sequences, 64 tokens", "long-tailed: 8 sequences"):
        assert load in said
    assert len(re.findall(r"ours / transformers \d+\.\d\d", said)) == 4  # by time and by CPU time
    assert "load average" in said


def test_conversion_benchmark_prints_a_ratio_for_each_verb_and_little_memory(tmp_path: Path) -> None:
    said = run_tool("bench_convert.py", "--gib", "0.4", "--runs", "1", "--folder", str(tmp_path))
    assert "--max-memory 128 MiB" in said
    rows = re.findall(r"^(\S+) +\d.*?\) +(\d+\.\d\d) +\d.*?\) +(\d+) \(", said, re.M)
    assert [row[0] for row in rows] == ["baseline", "hf-to-megatron", "megatron-to-hf", "cast"]
    assert all(int(peak) < 256 for _, _, peak in rows[1:])
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(1000)
def test_loss_benchmark_compares_every_operator_in_time_and_memory() -> None:
    """torch.compile would take half a minute of compiling."""
    words = ["--device", "cpu", "--shapes", "512,4096,16", "--runs", "1", "--sides", "ours", "naive", "Mega", "three"]
    said = run_tool("bench_loss.py", *words, timeout=900)
    for title in (
        "logprob: T 512",
        "logits: T 512, V 4096, entropy as a metric",
        "linear: T 512",
        "as a bonus",
        "forward: T 512",
    ):
        assert title in said
    ratio = r"ours / naive PyTorch: time \d+\.\d\d, CPU time \d+\.\d\d, memory \d+\.\d\d"
    assert len(re.findall(ratio, said)) == 7  # three operators with the entropy as metric and bonus, one without
    assert re.search(r"ours +\d.* ms +CPU .* peak +\d+ MiB .* GB/s, +\d+% of a copy", said)
    assert "ours / three bare products" in said
    assert "Megatron-Core (no entropy): left out: has no entropy" in said


@pytest.mark.timeout(1600)
def test_step_benchmark_prints_the_ratio_to_trl(tmp_path: Path) -> None:
    """TRL is installed into an environment of its own, as for a user."""
    words = ["--runs", "1", "--steps", "3", "--groups", "4", "--group-size", "4", "--response", "8"]
    said = run_tool("bench_step.py", *words, "--venv", str(tmp_path / "trl"), timeout=1500)
    assert re.search(r"ours: \d+\.\d\d .*s/step, .* CPU s/step, peak memory \d+\.\d\d GiB", said)
    assert re.search(r"of these: generate \d+\.\d\d, pull", said)
    assert re.search(r"ours / TRL: time \d+\.\d\d, CPU time \d+\.\d\d, memory \d+\.\d\d", said)
