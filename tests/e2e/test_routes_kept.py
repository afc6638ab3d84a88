"""Files of routes over a run that is killed and resumed: what is needed is there, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron_rl.rollout.ledger import Ledger

from .runs import ROOT, environment, make_inputs, train, train_command

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
CONFIG = ROOT / "configs" / "tiny_moe_gspo.yaml"
WORDS = (
    "parallel.tensor_model_parallel_size=1",
    "parallel.sequence_parallel=false",
    "parallel.expert_model_parallel_size=1",
    "steps=5",
    "sft.max_steps=4",
    "sft.stop_value=null",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.dynamic_sampling=off",
    "rollout.partial_rollouts=true",
    "rollout.oversample=2",
    "rollout.segment_tokens=2",
    "rollout.client_workers=2",
    "rollout.request_timeout_s=300",
    "rollout.step_timeout_s=600",
    "algorithm.corrections=[]",
    "eval.prompts=8",
    "eval.every=0",
    "checkpoint.every=1",
    "reward.components=[{name: sorting, correctness: true}, {name: sorting_format}]",
)


def files_of(run: Path) -> set[str]:
    """Files with routes."""
    return {path.name for path in (run / "routes").glob("s0*")}


def listed(run: Path) -> set[str]:
    """What the lists of kept checkpoints name."""
    return {name for path in (run / "routes").glob("saved-*.json") for name in json.loads(path.read_text())}


def test_a_killed_run_goes_on_with_its_routes_and_leaves_none_behind(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path / "inputs", prompts=256, eval_prompts=8, sft_prompts=64, experts=8)
    run = tmp_path / "run"
    with open(tmp_path / "first.log", "wb") as log:
        first = subprocess.Popen(
            train_command(run, inputs, *WORDS, config=CONFIG),
            stdout=log,
            stderr=log,
            env=environment(),
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 600
        while not (run / "checkpoints" / "step-000002").is_dir():
            assert first.poll() is None, (tmp_path / "first.log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    assert listed(run), "no checkpoint had a suspended group"
    assert listed(run) <= files_of(run)
    (run / "routes" / "s000000000-00000000-0.00000000.2x2x8.u1").write_bytes(b"left by a dead attempt")
    done = train(run, inputs, *WORDS, "--resume", config=CONFIG, timeout=600)
    assert done.code == 0, done.output
    assert [row["step"] for row in done.steps] == [1, 2, 3, 4, 5]
    assert all(row["routing/live_rows"] == 0 for row in done.steps)
    # Older weights chose a few others; rows of other tokens, or of another group, would differ nearly everywhere.
    assert all(row["routing/mismatch_engine"] < 0.1 for row in done.steps)
    assert max(row["rollout/resumed_tokens"] for row in done.steps) > 0
    assert "refer to routes of experts that are not in" not in (run / "logs" / "controller-0.log").read_text()
    assert listed(run) <= files_of(run)
    assert "s000000000-00000000-0.00000000.2x2x8.u1" not in files_of(run)
    trained = {draw for entry in Ledger(run).read() if entry.step < 5 for draw, _ in entry.trained}
    assert {name for name in files_of(run) if int(name[1:10]) in trained} <= listed(run)
