"""The command line converts under torchrun and mpirun, with all ranks, to the bytes of one process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.convert_models import contents, write_model
from tests.slurm.launchers import BIN, WITH_OPEN_MPI, why_not

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
CONVERT = f"{sys.executable} -m megatron_rl.cli convert"
STARTS = {
    "torchrun": f"{BIN}/torchrun --nproc-per-node 3 -m megatron_rl.cli convert",
    "mpirun": f"{WITH_OPEN_MPI} mpirun.openmpi --oversubscribe -n 3 {CONVERT}",
}


def shell(command: str, folder: Path) -> str:
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.parametrize("launcher", STARTS)
def test_all_ranks_of_a_launcher_share_a_conversion(launcher: str, tmp_path: Path) -> None:
    if launcher == "mpirun" and (reason := why_not()):
        pytest.skip(reason)
    write_model(tmp_path / "hf", num_hidden_layers=4)
    shell(f"{CONVERT} hf-to-megatron hf alone --tp 2 --pp 4", tmp_path)
    said = shell(f"{STARTS[launcher]} hf-to-megatron hf shared --tp 2 --pp 4", tmp_path)
    assert said.count("bytes of tensors in 4 files") == 1  # rank 0 alone speaks
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")
    shutil.rmtree(tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "shared"]
