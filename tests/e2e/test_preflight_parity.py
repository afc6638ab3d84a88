"""`megatron-rl preflight --parity` as a user calls it: one engine, two trainer ranks, a verdict, an exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from .runs import QUICKSTART, environment, make_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def preflight(folder: Path, inputs: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_rl.cli", "preflight", str(QUICKSTART), f"run_dir={folder}"]
    command += [f"vars.inputs={inputs}", "--parity", "6", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())


def of(folder: Path) -> list[list[str]]:
    """Command lines of the processes that name `folder`."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if any(str(folder) in word for word in line)]


def test_the_verdict_is_the_exit_code_and_nothing_is_left_behind(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path / "inputs", prompts=16, eval_prompts=4, sft_prompts=4)
    run = tmp_path / "run"
    good = preflight(run, inputs)
    assert good.returncode == 0, good.stdout + good.stderr
    assert good.stdout.startswith("inputs: OK, 16 prompts")
    assert good.stdout.endswith("engine and trainer agree\n")
    assert f"s for the engine ({run}/preflight/logs/engine-0.log)\nthe engine samples" in good.stdout
    bad = preflight(run, inputs, "engine.dtype=bfloat16")
    assert bad.returncode == 1, bad.stdout + bad.stderr
    assert "most likely: dtype: the engine computes in bfloat16, the trainer in float32" in bad.stdout
    assert bad.stdout.endswith("engine and trainer do not agree\n")
    assert sorted(path.name for path in run.iterdir()) == ["preflight"]  # a run may begin there
    assert of(run) == []


def test_an_engine_that_cannot_be_reached_is_one_message(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path / "inputs", prompts=4, eval_prompts=4, sft_prompts=4)
    words = ("engine.urls=[http://127.0.0.1:9]", "engine.update_timeout_s=2", "parallel.tensor_model_parallel_size=1")
    found = preflight(tmp_path / "run", inputs, *words)
    assert found.returncode == 1
    assert "engine http://127.0.0.1:9" in found.stderr
    assert "Traceback" not in found.stderr
