"""Several ranks share one conversion, as forks that meet through torch's store: who writes what, and what kills do."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import TCPStore

from megatron_rl.addresses import free_port
from megatron_rl.cluster.bootstrap import is_launched
from megatron_rl.weights import WeightsError
from megatron_rl.weights.convert import actions, one_file
from megatron_rl.weights.convert.actions import Conversion
from megatron_rl.weights.convert.cuts import TargetLayout
from megatron_rl.weights.convert.opened import open_checkpoint
from megatron_rl.weights.convert.team import Team
from tests.convert_models import contents, convert, record_reads, silent, write_model


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    write_model(tmp_path / "hf")
    return tmp_path / "hf"


def cast(hf: Path, out: Path) -> Conversion:
    return actions.cast(open_checkpoint(hf), out, torch.float16, 2000)


def as_ranks(size: int, function: Callable[[Team], object], stale_s: float = 60.0) -> list[object]:
    """What `function` returned, or raised, on each of `size` forks; the exit code of one that was killed."""
    port, children = free_port(), []
    for rank in range(size):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                store = TCPStore("127.0.0.1", port, None, rank == 0)
                result: object = function(Team(rank, size, store, stale_s))
            except Exception as error:
                result = error
            os.write(writer, pickle.dumps(result))
            os._exit(0)
        os.close(writer)
        children.append((child, reader))
    found: list[object] = []
    for child, reader in children:
        with os.fdopen(reader, "rb") as pipe:
            content = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found.append(pickle.loads(content) if content else code)
    return found


def test_ranks_write_the_bytes_of_one_process_and_read_each_number_once(hf: Path, tmp_path: Path) -> None:
    def run(team: Team) -> tuple[int, int]:
        reads, told = record_reads(pytest.MonkeyPatch()), list[int]()  # this process is a fork
        cast(hf, tmp_path / "three").run(told.append, team=team)
        return sum(reads), sum(told)

    alone = cast(hf, tmp_path / "one")
    convert(alone)
    results = as_ranks(3, run)
    reads = [result[0] for result in results]  # type: ignore[index]
    assert sum(reads) == 2 * alone.size  # fp32 in, fp16 out
    assert max(reads) < 0.5 * sum(reads)
    assert [result[1] for result in results] == [alone.size] * 3  # type: ignore[index]
    assert contents(tmp_path / "three") == contents(tmp_path / "one")


def test_after_a_killed_rank_another_number_of_ranks_goes_on(hf: Path, tmp_path: Path) -> None:
    def killed(team: Team) -> None:
        if team.rank == 1:
            written, original = [0], one_file.is_finite

            def dying(data: torch.Tensor) -> bool:
                written[0] += 1
                if written[0] == 6:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(data)

            one_file.is_finite = dying  # this process is a fork
        cast(hf, tmp_path / "out").run(silent, team=team)

    first = as_ranks(3, killed, stale_s=1.0)
    assert first[1] == -signal.SIGKILL
    assert "rank 1 has written nothing for 1 s, and rank 0 waits for it" in str(first[0])
    assert isinstance(first[2], WeightsError)
    assert not (tmp_path / "out").exists()
    outcomes = as_ranks(2, lambda team: cast(hf, tmp_path / "out").run(silent, team=team).kept)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] > 0  # type: ignore[operator]
    convert(cast(hf, tmp_path / "whole"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("tensor", ["lm_head.weight", "model.embed_tokens.weight"])
def test_what_is_wrong_on_one_rank_ends_all_with_its_message(tensor: str, tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "bad")
    tensors[tensor][3, 3] = float("nan")
    save_file(tensors, tmp_path / "bad" / "model.safetensors")

    def run(team: Team) -> None:
        plan = actions.hf_to_megatron(open_checkpoint(tmp_path / "bad"), tmp_path / "out", TargetLayout(1, 2), None)
        plan.run(silent, team=team)

    messages = [str(error) for error in as_ranks(2, run)]
    failed = next(rank for rank, message in enumerate(messages) if "ends with it" not in message)
    assert "weight: NaN or infinity" in messages[failed]
    assert f"rank {failed}: {messages[failed]}" in messages[1 - failed]
    assert f"(rank {1 - failed} ends with it)" in messages[1 - failed]


def test_ranks_with_other_commands_do_not_mix(hf: Path, tmp_path: Path) -> None:
    def run(team: Team) -> None:
        dtype = (torch.float16, torch.bfloat16)[team.rank]
        actions.cast(open_checkpoint(hf), tmp_path / "out", dtype).run(silent, team=team)

    assert "rank 1 sees other source files than rank 0, or was given another command" in str(as_ranks(2, run)[1])
    assert not (tmp_path / "out").exists()


def test_a_shell_inside_an_allocation_is_no_rank() -> None:
    assert not is_launched({})
    assert not is_launched({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    assert not is_launched({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"})
    assert is_launched({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"})
    assert is_launched({"OMPI_COMM_WORLD_RANK": "0"})
    assert is_launched({"RANK": "0"})
