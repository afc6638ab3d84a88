"""Rank and world as a pure function of the environment: what launchers set, and what contradicts itself.

The environments are those of Slurm 22.05, Open MPI 4.1 and MPICH 5.0 for two nodes with two ranks each, cut to what
matters; `tests/slurm/test_bootstrap.py` starts the same ranks for real.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_rl
from megatron_rl.cluster.bootstrap import child_environment, task_of_step
from megatron_rl.cluster.started import BootstrapError, Started, is_listed, started

BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_NODELIST": "node[1-2]",
    "SLURMD_NODENAME": "node1", "SLURM_NNODES": "2",
}  # fmt: skip
STEP = BATCH | {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURMD_NODENAME": "node2",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "node[1-2]",
}  # fmt: skip
SUBSET = STEP | {
    "SLURM_NODELIST": "node[1-3]", "SLURM_STEP_NODELIST": "node[2-3]", "SLURMD_NODENAME": "node3", "SLURM_STEP_ID": "5",
}  # fmt: skip
HET = STEP | {"SLURM_STEP_NODELIST": "node[1-3]", "SLURM_STEP_TASKS_PER_NODE": "1,2,1"}
PMIX = STEP | {"SLURM_MPI_TYPE": "pmix", "PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.7.0"}
PMI2 = STEP | {"SLURM_MPI_TYPE": "pmi2", "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_JOBID": "7.0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "PMIX_RANK": "3",
}  # fmt: skip
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
DAEMON_STEP = STEP | {  # of the one process a node that mpirun and mpiexec start to start the ranks
    "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
}  # fmt: skip
TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN = TORCH | {"TORCHELASTIC_RUN_ID": "7", "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1"}
LOCAL = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MEGATRON_RL_LAUNCH": "abc"}

RANK_3 = (3, 4, 1)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param(STEP, Started("srun", *RANK_3, key="7.0.0"), id="srun"),
        pytest.param(SUBSET, Started("srun", *RANK_3, key="7.5.0"), id="srun on some nodes of the job"),
        pytest.param(HET, Started("srun", *RANK_3, key="7.0.0"), id="srun over two parts of a heterogeneous job"),
        pytest.param(STEP | {"SLURM_RESTART_COUNT": "2"}, Started("srun", *RANK_3, key="7.0.2"), id="requeued"),
        pytest.param(PMIX, Started("srun --mpi=pmix", *RANK_3, key="7.0.0", mpi=True), id="srun --mpi=pmix"),
        pytest.param(PMI2, Started("srun --mpi=pmi2", *RANK_3, key="7.0.0", mpi=True), id="srun --mpi=pmi2"),
        pytest.param(OPEN_MPI, Started("mpirun", *RANK_3, mpi=True), id="mpirun"),
        pytest.param(BATCH | OPEN_MPI, Started("mpirun", *RANK_3, mpi=True), id="mpirun, ranks of the batch node"),
        pytest.param(DAEMON_STEP | OPEN_MPI, Started("mpirun", *RANK_3, mpi=True), id="mpirun, ranks of other nodes"),
        pytest.param(HYDRA, Started("mpiexec", *RANK_3, mpi=True), id="mpiexec"),
        pytest.param(DAEMON_STEP | HYDRA, Started("mpiexec", *RANK_3, mpi=True), id="mpiexec in a job"),
        pytest.param(TORCHRUN, Started("torchrun", *RANK_3), id="torchrun"),
        pytest.param(DAEMON_STEP | TORCHRUN, Started("torchrun", *RANK_3), id="torchrun, one on each node of a step"),
        pytest.param(PMIX | DAEMON_STEP | {"PMIX_RANK": "1"} | TORCHRUN, Started("torchrun", *RANK_3), id="pmix site"),
        pytest.param(STEP | TORCH, Started("torchrun", *RANK_3), id="a wrapper that exports the same rank"),
        pytest.param(LOCAL, Started("`megatron-rl train`", 3, 4, 3, key="abc"), id="megatron-rl train"),
        pytest.param(BATCH | LOCAL, Started("`megatron-rl train`", 3, 4, 3, key="abc"), id="... in a batch script"),
    ],
)
def test_what_a_launcher_sets_gives_the_rank(environ: dict[str, str], expected: Started) -> None:
    assert started(environ) == expected


NESTED = BATCH | {
    "SLURM_NTASKS": "1", "SLURMD_NODENAME": "node3", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NODELIST": "node1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        pytest.param({}, ["neither RANK nor SLURM_STEP_ID", "megatron-rl train"], id="nothing"),
        pytest.param(BATCH, ["SLURM_PROCID=0", "SLURM_NTASKS=4", "srun python -m"], id="body of a batch script"),
        pytest.param({"SLURM_JOB_ID": "7"}, ["SLURM_JOB_ID=7", "srun python -m"], id="shell of salloc"),
        pytest.param(NESTED, ["SLURMD_NODENAME=node3", "SLURM_STEP_NODELIST=node1", "env -u"], id="sbatch in a step"),
        pytest.param(BATCH | {**STEP, "SLURM_NTASKS": "8"}, ["SLURM_NTASKS=8", "SLURM_STEP_NUM_TASKS=4"], id="tasks"),
        pytest.param(STEP | {"SLURM_PROCID": "4"}, ["SLURM_PROCID=4", "SLURM_STEP_NUM_TASKS=4"], id="rank too high"),
        pytest.param(STEP | {"SLURM_LOCALID": "4"}, ["SLURM_LOCALID=4", "SLURM_STEP_NUM_TASKS=4"], id="local too high"),
        pytest.param(STEP | {"SLURM_STEP_NUM_TASKS": "x"}, ["SLURM_STEP_NUM_TASKS=x", "whole number"], id="no number"),
        pytest.param(STEP | {"SLURM_STEP_NODELIST": "node[1-"}, ["SLURM_STEP_NODELIST=node[1-"], id="no nodelist"),
        pytest.param({"SLURM_STEP_ID": "0"}, ["SLURM_STEP_NUM_TASKS=(unset)"], id="half a step"),
        pytest.param({"RANK": "0"}, ["RANK=0", "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"], id="half of torch"),
        pytest.param(LOCAL | {"RANK": "4"}, ["RANK=4", "WORLD_SIZE=4"], id="torch rank too high"),
        pytest.param(LOCAL | {"LOCAL_RANK": "4"}, ["LOCAL_RANK=4", "WORLD_SIZE=4"], id="torch local rank too high"),
        pytest.param(STEP | TORCH | {"RANK": "0"}, ["RANK=0", "srun started this as rank 3", "export"], id="exported"),
        pytest.param(
            STEP | TORCHRUN | {"GROUP_WORLD_SIZE": "1"},
            ["SLURM_STEP_NUM_TASKS=4", "GROUP_WORLD_SIZE=1", "--ntasks-per-node=1"],
            id="a torchrun for each task",
        ),
        pytest.param(
            DAEMON_STEP | {"PMIX_RANK": "3"}, ["PMIX_RANK=3", "SLURM_PROCID=1", "srun --mpi=pmix"], id="two launchers"
        ),
        pytest.param({"PMIX_RANK": "3"}, ["PMIX_RANK=3", "mpirun, mpiexec or srun"], id="an unknown launcher"),
    ],
)
def test_a_contradiction_is_refused_with_what_to_change(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(BootstrapError) as refusal:
        started(environ)
    assert [word for word in words if word not in str(refusal.value)] == []


@pytest.mark.parametrize(
    ("nodelist", "names", "others"),
    [
        ("login,gpu7", ["login", "gpu7"], ["gpu", "gpu77", "login,gpu7"]),
        ("gpu[08-10,3],login", ["gpu08", "gpu10", "gpu3"], ["gpu8", "gpu11", "gpu03", "gpu", "gpux"]),
        ("gpu[098-101]", ["gpu098", "gpu101"], ["gpu98", "gpu0100", "gpu102"]),
        ("r[1-2]n[01-02]", ["r1n01", "r2n02"], ["r3n01", "r1n03", "r1n1", "r1"]),
        ("a[1,3]-ib,b-[2].x", ["a3-ib", "b-2.x"], ["a2-ib", "a3", "b-2yx"]),
        ("[1-2]", ["1", "2"], ["3", ""]),
        ("a[1-x],b[],c[\u0663-\u0665],d[2-1],e[1-2", [], ["a1", "b", "c4", "d1", "e1", ""]),
    ],
)
def test_a_node_is_found_in_slurms_short_form(nodelist: str, names: list[str], others: list[str]) -> None:
    assert [node for node in [*names, *others] if is_listed(node, nodelist)] == names


@pytest.mark.parametrize(("environ", "expected"), [(STEP, ("node2", 3)), ({"SLURMD_NODENAME": "node7"}, ("node7", 0))])
def test_a_task_knows_its_node_and_number(environ: dict[str, str], expected: tuple[str, int]) -> None:
    assert task_of_step(environ) == expected


@pytest.mark.parametrize("value", ["x", "", "-1"])
def test_a_task_whose_number_is_none_is_refused_in_words(value: str) -> None:
    with pytest.raises(BootstrapError, match=f"SLURM_PROCID={value} should be a whole number"):
        task_of_step({"SLURM_PROCID": value})
    keeper = [sys.executable, "-m", "megatron_rl.cluster.keeper", "--run=r", "--role=x", "--on-stop=end", "true"]
    ended = subprocess.run(keeper, env={**os.environ, "SLURM_PROCID": value}, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert f"error: SLURM_PROCID={value} should" in ended.stderr


@pytest.mark.parametrize("environ", [STEP, PMIX, PMI2, OPEN_MPI, HYDRA, TORCHRUN, LOCAL, BATCH | TORCH])
def test_a_child_takes_itself_for_no_rank(environ: dict[str, str]) -> None:
    others = {"PATH": "/bin", "HOME": "/h", "CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO", "SLURM_CONF": "/s.conf"}
    child = child_environment(environ | others)
    assert child.items() >= others.items()
    with pytest.raises(BootstrapError, match="not started as a rank"):
        started(child)
    assert {name for name in child if name.startswith(("SLURM", "PMI", "OMPI", "MPI_LOCAL"))} == {"SLURM_CONF"}


def test_nothing_else_reads_the_variables_of_a_rank() -> None:
    package = Path(megatron_rl.__file__).parent
    names = re.compile(
        r"""["'](RANK|WORLD_SIZE|LOCAL_RANK|MASTER_\w+|SLURMD_NODENAME|SLURM_(PROCID|LOCALID|NTASKS|STEP_\w+)|PMIX?_|OMPI_)"""
    )
    readers = {path.name for path in package.rglob("*.py") if names.search(path.read_text("utf-8"))}
    assert readers == {"bootstrap.py", "started.py", "local.py"}  # the last one sets them
