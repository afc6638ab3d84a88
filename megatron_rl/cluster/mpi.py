"""Asking MPI whether its world is the one that the launcher announced. Only here, and only then, mpi4py is imported.

Importing it starts nothing: a library that does not fit the launcher may end the process when MPI starts.
"""

from __future__ import annotations

import logging
from typing import Any

from .meeting import ThroughMpi
from .started import BootstrapError, Started

log = logging.getLogger(__name__)


def mpi_world(start: Started) -> ThroughMpi | None:
    """MPI's world as a place to meet; None where srun started us and there is no mpi4py: the step's variables do."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if start.key:
            return None
        raise BootstrapError(
            f"{start.by} started this process, but mpi4py cannot be used: {error}. Install it (pip install "
            "'megatron-rl[mpi]', with an MPI library), or start the ranks with torchrun or srun"
        ) from error
    _warn_of_abort(start, MPI)
    MPI.Init_thread(MPI.THREAD_SERIALIZED)
    _check_world(start, MPI)
    # Not left to the end of the process, where it would wait for the others, also when this rank fails.
    return ThroughMpi(MPI.COMM_WORLD, MPI.Finalize)


def _warn_of_abort(start: Started, mpi: Any) -> None:
    """Before MPI starts: where it does not fit its launcher, it may end this process without a word of ours."""
    library = _library(mpi)
    is_open_mpi = "Open MPI" in library
    if is_open_mpi != (start.by in ("mpirun", "srun --mpi=pmix")):
        log.warning(
            "%s started this process, and mpi4py uses %s, which may not understand that. If MPI aborts now: %s",
            start.by,
            library,
            _other_launcher(start),
        )


def _library(mpi: Any) -> str:
    """`MPICH Version: 5.0.2` or `Open MPI v4.1.4`."""
    first = mpi.Get_library_version().splitlines()[0].split(",")[0]
    return " ".join(first.replace("\0", "").split())


def _other_launcher(start: Started) -> str:
    if start.key:
        return "choose another plugin (srun --mpi=list) or none (srun --mpi=none); without one, Slurm alone is asked"
    return f"use the {start.by} of that library, or point MPI4PY_LIBMPI at the libmpi of this one"


def _check_world(start: Started, mpi: Any) -> None:
    comm = mpi.COMM_WORLD
    if (comm.rank, comm.size) == (start.rank, start.world_size):
        return
    raise BootstrapError(
        f"{start.by} started rank {start.rank} of {start.world_size}, but MPI sees rank {comm.rank} of {comm.size}: "
        f"{_library(mpi)}, which mpi4py uses, does not belong to this launcher: {_other_launcher(start)}"
    )
