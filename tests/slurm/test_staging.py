"""Weights staged in the memory of engine nodes, on nodes that share a file system and no memory."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from megatron_rl.cluster.run_dir import RunDir
from megatron_rl.cluster.staging import Stage

from .minislurm import MiniSlurm
from .train_jobs import PATIENCE_S, TINY, assert_books_whole, submit_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_one_process_a_node_reads_new_weights_and_an_engine_that_comes_back_starts_from_its_copy(
    slurm: MiniSlurm, inputs: Path, tmp_path: Path
) -> None:
    words = ("engine.replicas=3", "cluster.engines_per_node=2", "engine.weight_transport=disk")
    run = submit_run(
        slurm, tmp_path / "run", inputs, *TINY, *words, "engine.stage_in_memory=true", "steps=100000", nodes=4
    )
    copies = Stage(RunDir(run.folder)).folder
    run.wait_for_step(2)
    run.send(signal.SIGKILL, "engines", rank=1)
    endpoint = run.folder / "endpoints" / "engine-2.json"  # the only one of the second node

    def came_back() -> bool:
        return str(json.loads(endpoint.read_text())["model"]).startswith(f"{copies}/v")

    run.job.wait_for(came_back, PATIENCE_S, "the engine of the second node, from its copy")
    run.wait_for_step(max(run.steps) + 2)
    reports = [json.loads((run.folder / "weights" / "staged" / f"node{i}.json").read_text()) for i in (3, 4)]
    assert [report["replicas"] for report in reports] == [[0, 1], [2]]
    run.job.cancel()
    run.job.wait_for_end(timeout_s=PATIENCE_S)
    assert len(run.attempts) == 1
    assert_books_whole(run)
    for node, task in (("node3", 0), ("node4", 1)):
        said = (run.logs / "attempt-1" / f"engines-{node}-{task}.log").read_text()
        copied = re.findall(rf"copied {re.escape(str(run.folder))}/weights/(v\d+) to {copies}/", said)
        assert len(copied) == len({*copied}) > 3
    assert "read it themselves" not in (run.logs / "attempt-1" / "trainer-node1-0.log").read_text()
