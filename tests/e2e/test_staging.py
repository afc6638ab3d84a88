"""Weights staged in memory, in real runs: who copies, from where an engine that comes back starts, what is left."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from megatron_rl.audit import audit_run
from megatron_rl.cluster.run_dir import RunDir
from megatron_rl.cluster.staging import Stage

from .live import LiveRun
from .runs import make_inputs
from .test_kill import TINY

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TWO = (
    *TINY,
    "cluster.stop_timeout_s=30",
    "engine.replicas=2",
    "engine.weight_transport=disk",
    "engine.stage_in_memory=true",
)


def model_of(folder: Path, replica: int) -> str:
    """The directory that an engine has loaded at its start."""
    return str(json.loads((folder / "endpoints" / f"engine-{replica}.json").read_text())["model"])


def test_two_supervisors_of_a_machine_copy_each_version_once_and_engines_start_from_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    copies = Stage(RunDir(folder)).folder
    inputs = make_inputs(tmp_path / "inputs", prompts=8, eval_prompts=8, sft_prompts=64)
    with LiveRun(folder, inputs, "steps=100000", *TWO, "eval.every=0") as run:
        run.wait_for_step(1)
        for replica in range(2):
            run.send(signal.SIGKILL, "engine", replica)
            run.wait_until("its copy", lambda: model_of(folder, replica).startswith(f"{copies}/v"))  # noqa: B023
        run.wait_until("the end of older copies", lambda: len(list(copies.glob("v*"))) == 1)
        run.send(signal.SIGTERM, "launcher")
        assert run.end() == 75, run.output
    assert not copies.exists()
    assert audit_run(folder).problems == []
    logs = "".join((folder / "logs" / f"engine-{replica}.log").read_text() for replica in range(2))
    copied = re.findall(rf"copied {folder}/weights/(v\d+) to {copies}/", logs)
    assert len(copied) == len({*copied}) > 2
    assert "read it themselves" not in run.output + (folder / "logs" / "trainer-0.log").read_text()
