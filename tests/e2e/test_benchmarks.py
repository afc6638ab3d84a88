"""The benchmarks run from end to end and print both sides and their ratio; what the numbers are is not tested."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .runs import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def run_tool(name: str, *words: str, timeout: float = 300) -> str:
    command = [sys.executable, str(ROOT / "tools" / name), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name", ["bench_step.py", "bench_engine.py", "bench_loss.py", "bench_client.py", "bench_convert.py"]
)
def test_help_says_what_is_compared(name: str) -> None:
    said = run_tool(name, "--help")
    assert "--runs" in said
    assert re.search("TRL's GRPOTrainer|transformers.generate|naive PyTorch|bare aiohttp|bare safetensors", said)


def test_engine_benchmark_prints_a_ratio_for_each_load() -> None:
    said = run_tool(
        "bench_engine.py",
        *["--runs", "1", "--groups", "2", "--group-size", "4", "--length", "8", "--mean", "4", "--longest", "16"],
    )
    for load in ("uniform: 8 sequences, 64 tokens", "long-tailed: 8 sequences"):
        assert load in said
    assert len(re.findall(r"ours / transformers \d+\.\d\d", said)) == 4  # by time and by CPU time
    assert "load average" in said


def test_client_benchmark_prints_a_ratio_for_each_length_and_the_slope_of_memory() -> None:
    words = ["--concurrency", "16", "--runs", "2", "--tokens", "4096"]
    said = run_tool("bench_client.py", *words, "--lengths", "64", "512")
    for tokens, requests in ((64, 64), (512, 16)):
        assert f"{tokens} tokens: {requests} requests a round, 16 at once, 2 rounds" in said
    assert len(re.findall(r"ours / bare by (?:CPU )?time: \d+\.\d\d", said)) == 4
    assert re.search(r"slope [+-]\d+\.\d\d MiB/min", run_tool("bench_client.py", *words, "--soak", "3"))


def test_conversion_benchmark_prints_a_ratio_for_each_verb_and_memory_below_its_limit(tmp_path: Path) -> None:
    said = run_tool("bench_convert.py", "--gib", "0.4", "--runs", "1", "--folder", str(tmp_path))
    assert "--max-memory 512 MiB" in said
    rows = re.findall(r"^(\S+) +\d.*?\) +(\d+\.\d\d) +\d.*?\) +(\d+) \(", said, re.M)
    assert [row[0] for row in rows] == ["baseline", "hf-to-megatron", "megatron-to-hf", "cast"]
    assert all(int(peak) < 512 for _, _, peak in rows[1:])
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


PARTIAL = ("--groups", "8", "--group-size", "4", "--median", "16", "--layers", "2", "--engines", "1", "--steps", "24")


def test_partial_rollouts_are_timed_against_synchronous_ones_and_leave_lengths_as_they_were() -> None:
    said = run_tool("bench_partial.py", *PARTIAL)
    assert re.search(r"partial / sync: time \d+\.\d\d, engines' CPU time \d+\.\d\d", said)
    assert said.count("the same distribution") == 3
    assert "NOT" not in said


def test_a_scheduler_that_throws_unfinished_responses_away_fails_the_test_of_lengths() -> None:
    command = [sys.executable, str(ROOT / "tools" / "bench_partial.py"), *PARTIAL, "--biased"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"partial and fresh draws .* NOT the same distribution", done.stdout), done.stdout
    assert re.search(r"sync and fresh draws .*, the same distribution", done.stdout), done.stdout
