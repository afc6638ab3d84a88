"""The ways in which a user starts the ranks on a cluster, each as lines of a batch script; holds no tests."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

BIN = Path(sys.executable).parent
OPEN_MPI = next(Path("/usr/lib").glob("*/libmpi.so.40"), None)
"""That of the distribution. The MPICH beside it comes from PyPI, and mpi4py takes it unless it is told otherwise."""
RANK_OPTIONS = "--nodes=2 --ntasks=4 --ntasks-per-node=2"
AS_ROOT = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
WITH_OPEN_MPI = f"MPI4PY_LIBMPI={OPEN_MPI} MPI4PY_MPIABI=openmpi {AS_ROOT}"


def why_not() -> str | None:
    """Why these cannot be tried on this machine."""
    if OPEN_MPI is None or not shutil.which("mpirun.openmpi"):
        return "needs Open MPI: tests/run.sh --install-system, or apt-get install openmpi-bin"
    return None


def launchers(python: str, module: str) -> Mapping[str, str]:
    """By name, the command that runs `python -m module` as four ranks on the two nodes of the job."""
    command = f"{python} -m {module}"
    rendezvous = (
        "--rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$(hostname):$((20000 + SLURM_JOB_ID % 9999))"
    )
    return {
        "srun": f"srun {RANK_OPTIONS} {command}",
        "srun --mpi=pmix": f"{WITH_OPEN_MPI} srun --mpi=pmix {RANK_OPTIONS} {command}",
        "srun --mpi=pmi2": f"srun --mpi=pmi2 {RANK_OPTIONS} {command}",
        "mpirun": f"{WITH_OPEN_MPI} mpirun.openmpi -n 4 {command}",
        "mpiexec": f"{BIN}/mpiexec -n 4 {command}",
        "torchrun": f"srun --nodes=2 --ntasks-per-node=1 --ntasks=2 {BIN}/torchrun --nnodes=2 --nproc-per-node=2 "
        f"{rendezvous} -m {module}",
    }
