"""Who started this process, and as which rank: a pure function of the environment. Nobody is asked or met here.

    RANK set              torchrun or `megatron-rl train`, also inside a Slurm job: they were started last
    OMPI_, PMI_, PMIX_    mpirun, mpiexec, or srun --mpi=pmix|pmi2
    SLURM_STEP_ID set     plain srun: the variables of the step, never those of the job

The variables of the job describe the allocation, not the world: in the body of a batch script SLURM_PROCID and
SLURM_NTASKS look like rank 0 of many, although nobody else was started. Whatever contradicts itself is refused, since
the alternative is a hang: one message names the variable, its value and the line to change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

LAUNCH = "MEGATRON_RL_LAUNCH"
"""Set by `megatron-rl train` for its ranks: a name for this start, under which they meet."""
MPI_LAUNCHERS = {
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
}
"""Open MPI's, and that of MPICH and its relatives: rank, size and local rank."""
SRUN = "srun python -m megatron_rl.train CONFIG"
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


class BootstrapError(RuntimeError):
    """What started this process does not say consistently which rank it is; the message says what to change."""


@dataclass(frozen=True)
class Started:
    """What the environment says about this process."""

    by: str
    """The launcher, as a user would write it."""
    rank: int
    world_size: int
    local_rank: int
    """Among the ranks of this node."""
    key: str = ""
    """Name of this world among all that use the same run directory; empty when it needs none."""
    mpi: bool = False
    """Started by MPI's own launcher or through Slurm's MPI plugin."""


def started(environ: Mapping[str, str]) -> Started:
    """Who started this process, and as which rank: a pure function of the environment.

    Raises BootstrapError when the environment is incomplete or contradicts itself.
    """
    step = _slurm_step(environ) if "SLURM_STEP_ID" in environ else None
    mpi = _mpi_launch(environ, step)
    if "RANK" in environ:
        return _torch_ranks(environ, mpi or step, step)
    found = mpi or step
    if found is not None:
        return found
    if "SLURM_PROCID" in environ:
        raise BootstrapError(
            f"SLURM_PROCID={environ['SLURM_PROCID']} is set but SLURM_STEP_ID is not: this is the batch script itself, "
            f"one process, although SLURM_NTASKS={environ.get('SLURM_NTASKS', 'unset')}. In the script, write: {SRUN}"
        )
    if "SLURM_JOB_ID" in environ:
        raise BootstrapError(
            f"SLURM_JOB_ID={environ['SLURM_JOB_ID']} is set but SLURM_STEP_ID is not: this shell holds an allocation, "
            f"and nothing was started on its nodes. Write: {SRUN}"
        )
    raise BootstrapError(
        "neither RANK nor SLURM_STEP_ID nor a variable of MPI is set: this process was not started as a rank. Start it "
        "with `megatron-rl train`, torchrun, srun or mpirun"
    )


def number(environ: Mapping[str, str], name: str) -> int:
    """The value of a launcher's variable. Raises BootstrapError when it is missing or no whole number."""
    text = environ.get(name)
    if text is None or not text.isdecimal():
        raise BootstrapError(
            f"{name}={text if text is not None else '(unset)'} should be a whole number: the environment of the "
            "launcher did not arrive whole. Do not set or unset its variables between it and this process"
        )
    return int(text)


def _torch_ranks(environ: Mapping[str, str], outer: Started | None, step: Started | None) -> Started:
    """RANK and the others. They hold inside a Slurm step or under MPI too, unless they were exported for all ranks."""
    local = LAUNCH in environ
    needed = ["RANK", "WORLD_SIZE", "LOCAL_RANK"] + ([] if local else ["MASTER_ADDR", "MASTER_PORT"])
    missing = [name for name in needed if name not in environ]
    if missing:
        raise BootstrapError(
            f"RANK={environ['RANK']} is set but {', '.join(missing)} not: torchrun sets all of {', '.join(needed)}. "
            "Start the ranks with torchrun, or unset RANK where srun or mpirun starts them"
        )
    rank, world = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    local_rank = number(environ, "LOCAL_RANK")
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank)):
        if value >= world:
            raise BootstrapError(f"{name}={value} is not below WORLD_SIZE={world}; do not set either by hand")
    elastic = "TORCHELASTIC_RUN_ID" in environ
    if elastic and step is not None and step.world_size != number(environ, "GROUP_WORLD_SIZE"):
        raise BootstrapError(
            f"SLURM_STEP_NUM_TASKS={step.world_size} torchruns were started, but GROUP_WORLD_SIZE="
            f"{environ['GROUP_WORLD_SIZE']} of them found each other. Write srun --ntasks-per-node=1 torchrun --nnodes="
            "NODES --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT ..., or leave torchrun out: " + SRUN
        )
    if not (elastic or local) and outer is not None and (outer.rank, outer.world_size) != (rank, world):
        raise BootstrapError(
            f"RANK={rank} and WORLD_SIZE={world} are set, but {outer.by} started this as rank {outer.rank} of "
            f"{outer.world_size}: they were exported before it. Remove `export RANK` and `export WORLD_SIZE`"
        )
    by = "`megatron-rl train`" if local else "torchrun"
    return Started(by, rank, world, local_rank, environ.get(LAUNCH, ""))


def _slurm_step(environ: Mapping[str, str]) -> Started:
    """The step that srun made. Refuses what sbatch inherited from a step in which it was called."""
    world, tasks = number(environ, "SLURM_STEP_NUM_TASKS"), number(environ, "SLURM_NTASKS")
    rank, local_rank = number(environ, "SLURM_PROCID"), number(environ, "SLURM_LOCALID")
    node, nodes = environ.get("SLURMD_NODENAME"), environ.get("SLURM_STEP_NODELIST", "(unset)")
    contradiction = ""
    if world != tasks:
        contradiction = f"SLURM_NTASKS={tasks} but SLURM_STEP_NUM_TASKS={world}"
    elif rank >= world:
        contradiction = f"SLURM_PROCID={rank} but SLURM_STEP_NUM_TASKS={world}"
    elif local_rank >= world:
        contradiction = f"SLURM_LOCALID={local_rank} but SLURM_STEP_NUM_TASKS={world}"
    elif node is not None and not is_listed(node, nodes):
        contradiction = f"SLURMD_NODENAME={node} is not in SLURM_STEP_NODELIST={nodes}"
    if contradiction:
        raise BootstrapError(
            f"{contradiction}: the variables of the step are another step's, as in a batch script that was submitted "
            f"from inside a step. In the script, write: {SRUN}; and submit with: env -u SLURM_STEP_ID sbatch ..."
        )
    restart = environ.get("SLURM_RESTART_COUNT", "0")
    key = f"{number(environ, 'SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}.{restart}"
    return Started("srun", rank, world, local_rank, key)


def is_listed(node: str, nodelist: str) -> bool:
    """Whether Slurm's short form of node names holds this one; what Slurm would not write holds none.

    `scontrol show hostnames` would tell, but a container often has no scontrol.

    >>> [is_listed(node, "gpu[08-10,3],login") for node in ("gpu09", "gpu3", "gpu9", "login")]
    [True, True, False, True]
    """
    for part in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodelist):
        pieces = re.split(r"\[([^\[\]]*)\]", part)  # text, inside of a bracket, text, inside, ..., text
        pattern = "".join("([0-9]{1,18})" if i % 2 else re.escape(piece) for i, piece in enumerate(pieces))
        match = re.fullmatch(pattern, node)
        if match and all(map(_is_within, match.groups(), pieces[1::2])):
            return True
    return False


def _is_within(number: str, ranges: str) -> bool:
    """Whether it is written as the numbers of one of the ranges are, and is one of them."""
    for bounds in filter(None, map(_RANGE.fullmatch, ranges.split(","))):
        first, last = bounds[1], bounds[2] or bounds[1]
        if number == f"{int(number):0{len(first)}d}" and int(first) <= int(number) <= int(last):
            return True
    return False


def _mpi_launch(environ: Mapping[str, str], step: Started | None) -> Started | None:
    """By mpirun or mpiexec, inside a Slurm job or not, or by srun with one of its MPI plugins; None without MPI."""
    for by, names in MPI_LAUNCHERS.items():
        if names[0] in environ and names[2] in environ:
            rank, size, local_rank = (number(environ, name) for name in names)
            return Started(by, rank, size, local_rank, mpi=True)
    name = next((name for name in ("PMI_RANK", "PMIX_RANK") if name in environ), None)
    if name is None:
        return None
    if step is None:
        raise BootstrapError(
            f"{name}={environ[name]} is set, but neither SLURM_STEP_ID nor a variable of mpirun or mpiexec: this "
            "launcher is not known here. Start the ranks with mpirun, mpiexec or srun"
        )
    plugin = "pmi2" if name == "PMI_RANK" else "pmix"
    if number(environ, name) != step.rank:
        raise BootstrapError(
            f"{name}={environ[name]} but SLURM_PROCID={step.rank}: they come from two launchers, one inside the other. "
            f"Let one of them start the ranks: srun --mpi={plugin} python -m megatron_rl.train CONFIG"
        )
    return replace(step, by=f"srun --mpi={plugin}", mpi=True)
