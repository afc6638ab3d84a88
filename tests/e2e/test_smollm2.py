"""A real pretrained model, SmolLM2-135M, through the whole circle on two pipeline stages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .runs import ROOT, make_inputs, train

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_two_countdown_steps_on_a_real_model(tmp_path: Path) -> None:
    tool = ROOT / "tools" / "fetch_smollm2.py"
    subprocess.run([sys.executable, str(tool), "--out", str(tmp_path / "model")], check=True, timeout=400)
    make_inputs(tmp_path / "inputs", task="countdown", style="english", no_model=None)
    config = ROOT / "configs" / "smollm2_countdown.yaml"
    run = train(tmp_path / "run", tmp_path, config=config, timeout=550)
    assert run.code == 0, run.output
    assert [row["step"] for row in run.steps] == [1, 2]
    # The engine is transformers: its log-probs and Megatron's agree on the real weights.
    assert max(row["gap/max_abs"] for row in run.steps) <= 1e-4
    assert all(row["rollout/response_length_mean"] > 5 for row in run.steps)
