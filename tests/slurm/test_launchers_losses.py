"""The real trainer takes the same steps to the same losses, whatever started its ranks."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cluster.run_dir import RunDir
from megatron_rl.config import dump, load_config
from tests.e2e.live import rows
from tests.e2e.runs import QUICKSTART

from . import launchers
from .jobs import submit
from .minislurm import MiniSlurm
from .train_jobs import ROOT, TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
STEPS = 3
ONE_RUN = """
run() { # DIRECTORY COMMAND: controller and engine here, the ranks by COMMAND
  local others=()
  "$PYTHON" -m megatron_rl.cli serve --config "$1/config.yaml" --replica 0 &>"$1/logs/engine" & others+=($!)
  "$PYTHON" -m megatron_rl.cli rollout --config "$1/config.yaml" &>"$1/logs/controller" & others+=($!)
  bash -c "$2" &>"$1/logs/trainer" || echo "$2: exit $?"
  kill -KILL "${others[@]}"; wait "${others[@]}" || true
}
"""


def prepare(folder: Path, inputs: Path) -> None:
    words = [f"run_dir={folder}", f"vars.inputs={inputs}", f"steps={STEPS}", f"sft.max_steps={STEPS}"]
    words += ["parallel.tensor_model_parallel_size=2", "parallel.data_parallel_size=1", "checkpoint.every=0"]
    words += ["algorithm.entropy_coef=0.1"]  # whose loss is not 0 where all answers are wrong
    run = RunDir(folder)
    run.prepare(resume=False)
    cfg = load_config(QUICKSTART, [*(word for word in TINY if word != "sft.data=null"), *words])
    run.write_config(dump(cfg))


def losses(folder: Path) -> list[tuple[str, Any]]:
    """Losses of the warm-up and of the RL steps, in the order in which they were taken."""
    return [(name, row[name]) for row in rows(folder) for name in ("sft/loss", "policy/loss") if name in row]


def test_every_launcher_trains_to_the_same_losses(slurm: MiniSlurm, inputs: Path, tmp_path: Path) -> None:
    reason = launchers.why_not()
    if reason:
        pytest.skip(reason)
    folders = {name: tmp_path / name.replace(" ", "_") for name in launchers.LAUNCHERS}
    lines = ["#!/bin/bash", f"PYTHON={shlex.quote(sys.executable)}", f"cd {shlex.quote(str(ROOT))}", ONE_RUN]
    for name, folder in folders.items():
        prepare(folder, inputs)
        command = launchers.start_ranks(name, f"megatron_rl.train {folder}/config.yaml", ranks_per_node=1)
        lines.append(f"run {folder} {shlex.quote(command)}")
    (tmp_path / "job.sh").write_text("\n".join(lines))
    job = submit(slurm, tmp_path / "job.sh", options=["--nodes=2", "--exclusive"], directory=tmp_path)
    assert job.wait_for_end(timeout_s=2000) == "COMPLETED", job.describe()
    found = {name: losses(folder) for name, folder in folders.items()}
    said = job.output() + (folders["srun"] / "logs" / "trainer").read_text()
    assert len([loss for _, loss in found["srun"] if loss]) == 2 * STEPS, said
    assert found == dict.fromkeys(found, found["srun"])
