"""The ways in which a user starts the ranks on a cluster, each as lines of a batch script; holds no tests."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

BIN = Path(sys.executable).parent
OPEN_MPI = next(Path("/usr/lib").glob("*/libmpi.so.40"), None)
"""That of the distribution. The MPICH beside it comes from PyPI, and mpi4py takes it unless it is told otherwise."""
AS_ROOT = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
WITH_OPEN_MPI = f"MPI4PY_LIBMPI={OPEN_MPI} MPI4PY_MPIABI=openmpi {AS_ROOT}"


def why_not() -> str | None:
    """Why these cannot be tried on this machine."""
    if OPEN_MPI is None or not shutil.which("mpirun.openmpi"):
        return "needs Open MPI: tests/run.sh --install-system, or apt-get install openmpi-bin"
    return None


LAUNCHERS = ("srun", "srun --mpi=pmix", "srun --mpi=pmi2", "mpirun", "mpiexec", "torchrun")


def tasks(ranks_per_node: int) -> str:
    """srun's options for so many ranks on each of the two nodes."""
    return f"--nodes=2 --ntasks={2 * ranks_per_node} --ntasks-per-node={ranks_per_node}"


def start_ranks(launcher: str, module: str, ranks_per_node: int) -> str:
    """The command that runs `python -m module` as ranks on the two nodes of the job."""
    command, options = f"{sys.executable} -m {module}", tasks(ranks_per_node)
    if launcher == "torchrun":
        port = "$((20000 + SLURM_JOB_ID % 9999))"
        rendezvous = f"--rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$(hostname):{port}"
        start = f"{BIN}/torchrun --nnodes=2 --nproc-per-node={ranks_per_node} {rendezvous}"
        return f"srun {tasks(1)} {start} -m {module}"
    return {
        "srun": f"srun {options} {command}",
        "srun --mpi=pmix": f"{WITH_OPEN_MPI} srun --mpi=pmix {options} {command}",
        "srun --mpi=pmi2": f"srun --mpi=pmi2 {options} {command}",
        "mpirun": f"{WITH_OPEN_MPI} mpirun.openmpi -n {2 * ranks_per_node} -npernode {ranks_per_node} {command}",
        "mpiexec": f"{BIN}/mpiexec -n {2 * ranks_per_node} -ppn {ranks_per_node} {command}",
    }[launcher]
