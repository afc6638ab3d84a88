"""Ranks that srun starts on two nodes share a conversion, to the bytes of one process."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.weights.convert.actions import hf_to_megatron
from megatron_rl.weights.convert.cuts import TargetLayout
from megatron_rl.weights.convert.opened import open_checkpoint
from tests.convert_models import contents, convert, write_model

from .jobs import submit
from .launchers import BIN, tasks
from .minislurm import MiniSlurm


def test_srun_converts_to_the_bytes_of_one_process(slurm: MiniSlurm, tmp_path: Path) -> None:
    write_model(tmp_path / "hf", num_hidden_layers=4)
    convert(hf_to_megatron(open_checkpoint(tmp_path / "hf"), tmp_path / "alone", TargetLayout(2, 4, 128), None))
    command = f"{BIN}/megatron-rl convert hf-to-megatron hf shared --tp 2 --pp 4"
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\ncd {tmp_path}\nsrun {tasks(1)} {command} >said 2>&1\n")
    job = submit(slurm, script, options=["--nodes=2", "--exclusive"], directory=tmp_path)
    state, said = job.wait_for_end(timeout_s=300), (tmp_path / "said").read_text()
    assert state == "COMPLETED", said
    assert said.count("bytes of tensors in 4 files") == 1, said  # rank 0 alone speaks
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")
    assert not list(tmp_path.glob(".converting*"))
