"""Programs in tools/ that no other test runs to their end; what times come out is not tested."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .runs import ROOT, run_tool

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_the_transport_benchmark_times_both_transports_against_the_bare_thing() -> None:
    words = ["--engine", "embedded", "--mib", "24", "--bucket-mib", "8", "--rounds", "1"]
    command = [sys.executable, "-m", "tools.bench_transport", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MB float32 to two servers (embedded), buckets of 8 MiB; load average" in done.stdout
    assert len(re.findall(r"^  bare: \d+\.\d\d ", done.stdout, re.M)) == 2
    ratios = json.loads(done.stdout.strip().splitlines()[-1].removeprefix("RESULT "))
    assert ratios.keys() == {"broadcast", "disk"}
    assert min(ratios.values()) > 0


def test_a_plan_is_compared_with_the_shards_that_megatron_builds() -> None:
    model = ROOT / "tests" / "model_configs" / "qwen3_30b_a3b"
    config = str(ROOT / "configs" / "qwen3_30b_a3b_gspo.yaml")
    said = run_tool("plan_model.py", config, "run_dir=x", "data.prompts=x", f"model.path={model}")
    rows = re.findall(r"^stage +0 rank +\d+: +48 layers, [\d,]+ parameters", said, re.M)
    assert len(rows) == 2
    assert said.endswith("every shard is as planned\n")


def test_a_plan_of_what_cannot_run_ends_with_2_and_the_reason(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "tools" / "plan_model.py"), str(tmp_path / "none.yaml")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"plan_model: {tmp_path / 'none.yaml'}: no such configuration file" in done.stderr


def test_bytes_of_the_losses_are_listed() -> None:
    said = run_tool("bench_loss.py", "--bytes")
    assert re.search(r"^ +6 +vocab_parallel_logprob", said, re.M), said
