"""The benchmarks of rollouts run from end to end; what times come out is not tested. They fetch nothing."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from .runs import ROOT, run_tool

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_client_benchmark_prints_a_ratio_for_each_length_and_the_slope_of_memory() -> None:
    words = ["--concurrency", "16", "--runs", "2", "--tokens", "4096"]
    said = run_tool("bench_client.py", *words, "--workers", "1", "--lengths", "64", "512")
    for tokens, requests in ((64, 64), (512, 16)):
        assert f"{tokens} tokens: {requests} requests a round, 16 at once, 2 rounds" in said
    for side in ("ours", "ours, 1 workers"):
        assert len(re.findall(rf"  {side} / bare by (?:CPU )?time: \d+\.\d\d", said)) == 4
    assert re.search(r"slope [+-]\d+\.\d\d MiB/min", run_tool("bench_client.py", *words, "--soak", "3"))


def test_routes_benchmark_prints_bytes_and_cpu_time_beside_those_of_json() -> None:
    words = ["--layers", "6", "--top-k", "4", "--experts", "32", "--tokens", "64", "--rounds", "1"]
    said = run_tool("bench_routes.py", *words, "--sequences", "10", "--length", "100")
    assert re.search(r"pack: written +24 +\S+ +0\.0", said)
    assert re.search(r"answer: base64, checked +128 ", said)
    assert re.search(r"ours / JSON: CPU \d+\.\d+, bytes sent \d\.\d\d", said)


PARTIAL = ("--groups", "8", "--group-size", "4", "--median", "16", "--layers", "2", "--engines", "1", "--steps", "24")
TOO_UNLIKELY = 1e-4
"""Draws decide here: at the 0.01 of the tool, three tests in a hundred would fail for nothing."""


def partial_rollouts(*words: str) -> tuple[str, int, dict[str, float]]:
    """What the benchmark printed, its exit code, and its p-values by the pair that was compared."""
    command = [sys.executable, str(ROOT / "tools" / "bench_partial.py"), *PARTIAL, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = re.findall(r"lengths of (.*) \(\d+ and \d+\): .* p = (\S+),", done.stdout)
    assert len(found) == 3, done.stdout + done.stderr
    return done.stdout, done.returncode, {pair: float(p) for pair, p in found}


def test_partial_rollouts_are_timed_against_synchronous_ones_and_leave_lengths_as_they_were() -> None:
    said, code, p_values = partial_rollouts()
    assert re.search(r"partial / sync: time \d+\.\d\d, engines' CPU time \d+\.\d\d", said)
    assert min(p_values.values()) > TOO_UNLIKELY, said
    assert code == ("NOT the same distribution" in said)


def test_a_scheduler_that_throws_unfinished_responses_away_fails_the_test_of_lengths() -> None:
    said, code, p_values = partial_rollouts("--biased")
    assert code == 1
    assert re.search(r"partial and fresh draws .* NOT the same distribution", said), said
    assert p_values["sync and fresh draws"] > TOO_UNLIKELY, said
