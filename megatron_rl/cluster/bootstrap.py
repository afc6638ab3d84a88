"""Which rank this process is and how it meets the others; what its children inherit. Nothing else reads who we are.

`started.py` reads the environment, `mpi.py` asks MPI where MPI launched us, `meeting.py` finds rank 0.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .meeting import InRunDir, Meeting
from .mpi import mpi_world
from .started import LAUNCH, number, started

TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", LAUNCH)
LAUNCHER_PREFIXES = ("SLURM_", "SLURMD_", "PMI_", "PMI2_", "PMIX_", "PRTE_", "OMPI_", "HYDI_", "HYDRA_", "MPI_LOCAL")
TORCHRUN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")


@dataclass(frozen=True)
class Place:
    """This process's rank and how it meets the others."""

    rank: int
    world_size: int
    local_rank: int
    meeting: Meeting | None
    """None where torchrun has told all ranks already: torch.distributed finds rank 0 by itself."""


def find_place(environ: Mapping[str, str], folder: Path) -> Place:
    """Rank, and the way to meet the other ranks; `folder` (shared by all nodes) is used when a file is needed.

    Raises BootstrapError when the environment is incomplete or contradicts itself, or MPI sees another world.
    """
    start = started(environ)
    meeting: Meeting | None = mpi_world(start) if start.mpi else None
    if meeting is None and start.key:
        who = f"the {start.world_size} that {start.by} started"
        file = folder / f"trainer-{start.key}.json"
        meeting = InRunDir(file, start.rank, who, environ.get("SLURMD_NODENAME"))
    return Place(start.rank, start.world_size, start.local_rank, meeting)


def is_launched(environ: Mapping[str, str]) -> bool:
    """Whether torchrun, mpirun or srun started this process as one of several ranks, and not in a shell of theirs."""
    if "RANK" in environ or "OMPI_COMM_WORLD_RANK" in environ or "PMI_RANK" in environ or "PMIX_RANK" in environ:
        return True
    return "SLURM_STEP_ID" in environ and environ.get("SLURM_STEP_NUM_TASKS") != "1"


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a process that is not a rank: without what the launchers of ranks left in it.

    An engine that finds them would take itself for a rank, and one that uses MPI would join our world and hang.
    SLURM_CONF stays: it says where Slurm is, not who we are.
    """
    ours = LAUNCHER_PREFIXES + TORCHRUN_PREFIXES
    return {
        name: value
        for name, value in environ.items()
        if name == "SLURM_CONF" or not (name in TORCH_VARIABLES or name.startswith(ours))
    }


def task_of_step(environ: Mapping[str, str]) -> tuple[str, int]:
    """Slurm's name of this node and the number of this task in its step; outside a step, the machine's name and 0.

    Raises BootstrapError when the number is none.
    """
    task = number(environ, "SLURM_PROCID") if "SLURM_PROCID" in environ else 0
    return environ.get("SLURMD_NODENAME", socket.gethostname()), task
