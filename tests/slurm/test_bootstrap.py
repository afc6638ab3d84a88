"""Every way to start the ranks gives the same ranks on a real Slurm, and a way that cannot work says so."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.cluster.started import is_listed

from . import launchers
from .jobs import Job, submit
from .minislurm import MiniSlurm

ROOT = Path(__file__).parents[2]
PROBE = "tests.slurm.rank_probe"
EXPECTED = [
    {"rank": rank, "world_size": 4, "local_rank": rank % 2, "node": f"node{1 + rank // 2}"} for rank in range(4)
]


def run_each(slurm: MiniSlurm, folder: Path, commands: dict[str, str]) -> Job:
    """One job of two nodes that runs each command in turn; what each left is in `folder` under its name."""
    lines = ["#!/bin/bash", f"cd {shlex.quote(str(ROOT))}"]
    for name, command in commands.items():
        place_of(folder, name).mkdir()
        lines.append(f"{command} > {place_of(folder, name)}/output 2>&1")
    script = folder / "job.sh"
    script.write_text("\n".join(lines) + "\nexit 0\n")
    options = ["--nodes=2", "--ntasks-per-node=2", "--exclusive", "--nodelist=node[1-2]"]
    job = submit(slurm, script, options=options, directory=folder)
    job.wait_for_end(timeout_s=400)
    return job


def place_of(folder: Path, name: str) -> Path:
    return folder / name.replace(" ", "_")


@pytest.fixture(scope="module")
def answers(slurm: MiniSlurm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which every launcher's four ranks have said who they are, and the wrong ones what is wrong."""
    reason = launchers.why_not()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("ranks")
    right = {
        name: launchers.start_ranks(name, f"{PROBE} {place_of(folder, name)}", ranks_per_node=2)
        for name in launchers.LAUNCHERS
    }
    run_each(slurm, folder, {**right, **wrong(folder)})
    return folder


def wrong(folder: Path) -> dict[str, str]:
    """Commands that cannot work: four worlds of one, or an MPI that does not understand its launcher."""
    probe = f"{sys.executable} -m {PROBE} {folder}"  # which none of them gets to use
    options, open_mpi = launchers.tasks(2), launchers.WITH_OPEN_MPI
    return {
        "no srun": probe,
        "exported": f"RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=1 srun {options} {probe}",
        "MPICH by pmix": f"srun --mpi=pmix {options} {probe}",
        "Open MPI by pmi2": f"{open_mpi} srun --mpi=pmi2 {options} {probe}",
        "MPICH by mpirun": f"{launchers.AS_ROOT} mpirun.openmpi -n 4 {probe}",
    }


@pytest.mark.parametrize("name", launchers.LAUNCHERS)
def test_every_launcher_gives_the_same_ranks_in_one_world(answers: Path, name: str) -> None:
    said = (place_of(answers, name) / "output").read_text()
    ranks = [json.loads(path.read_text()) for path in place_of(answers, name).glob("rank-*.json")]
    assert len({rank.pop("world") for rank in ranks}) == 1, said
    assert sorted(ranks, key=rank_of) == EXPECTED, said


def rank_of(facts: dict[str, Any]) -> int:
    return facts["rank"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no srun", ["REFUSED SLURM_PROCID=0 is set but SLURM_STEP_ID is not", "srun python -m"]),
        ("exported", ["REFUSED RANK=0 and WORLD_SIZE=4 are set, but srun started this as rank 3 of 4"]),
        ("MPICH by pmix", ["mpi4py uses MPICH", "If MPI aborts now", "srun --mpi=none"]),
        ("Open MPI by pmi2", ["mpi4py uses Open MPI", "If MPI aborts now", "srun --mpi=none"]),
        ("MPICH by mpirun", ["mpi4py uses MPICH", "If MPI aborts now", "use the mpirun of that library"]),
    ],
)
def test_a_launcher_that_cannot_work_says_what_to_change(answers: Path, name: str, words: list[str]) -> None:
    text = (place_of(answers, name) / "output").read_text()
    assert [word for word in words if word not in text] == [], text


def test_worlds_of_one_rank_each_are_refused(tmp_path: Path) -> None:
    """MPICH's mpiexec outside a job, and Open MPI: each process is a whole world to itself, without any error."""
    reason = launchers.why_not()
    if reason:
        pytest.skip(reason)
    command = f"{launchers.WITH_OPEN_MPI} {launchers.BIN}/mpiexec -n 2 {sys.executable} -m {PROBE} {tmp_path}"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "REFUSED mpiexec started rank 1 of 2, but MPI sees rank 0 of 1: Open MPI" in done.stderr
    assert "point MPI4PY_LIBMPI at the libmpi of this one" in done.stderr


def test_a_batch_script_submitted_inside_a_step_is_no_rank(slurm: MiniSlurm, tmp_path: Path) -> None:
    (tmp_path / "inner.sh").write_text(f"#!/bin/bash\ncd {ROOT}\n{sys.executable} -m {PROBE} {tmp_path}\n")
    inner = f"sbatch --wait --exclusive -N1 -n1 --output={tmp_path}/inner.out {tmp_path}/inner.sh"
    (tmp_path / "outer.sh").write_text(f"#!/bin/bash\nsrun -N1 -n1 {inner}\n")
    outer = submit(slurm, tmp_path / "outer.sh", options=["-N1", "-n1", "--exclusive"], directory=tmp_path)
    outer.wait_for_end(timeout_s=120)
    assert "is not in SLURM_STEP_NODELIST=" in (tmp_path / "inner.out").read_text()


# --------------------------------------------------------------------------------------------------- names of the nodes

NUMBERS = st.integers(0, 1200).flatmap(lambda n: st.integers(1, 4).map(lambda width: f"{n:0{width}d}"))
WORDS = st.sampled_from(["node", "gpu", "n", "rack-a", "x1y", "gpu-b200-"])
NAMES = st.builds("{}{}".format, WORDS, NUMBERS) | st.builds("{}{}n{}".format, WORDS, NUMBERS, NUMBERS) | WORDS


@settings(max_examples=40, deadline=None)
@given(names=st.lists(NAMES, min_size=1, max_size=60), others=st.lists(NAMES, max_size=20))
def test_nodelists_hold_the_names_that_slurm_shortened_and_no_others(
    slurm: MiniSlurm, names: list[str], others: list[str]
) -> None:
    short = slurm.run("scontrol", "show", "hostlistsorted", ",".join(names)).strip()
    written_out = set(slurm.run("scontrol", "show", "hostnames", short).split())
    assert {name for name in (*names, *others) if is_listed(name, short)} == written_out == set(names)
