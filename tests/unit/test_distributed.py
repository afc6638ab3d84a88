"""What a rank says before it joins the others, where what was started cannot work."""

from __future__ import annotations

import pytest

from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.policy.distributed import DistributedError, device_problem, initialize
from tests.parallel.launch import this_rank


def test_a_rank_that_sees_only_the_gpu_of_another_is_told_to_see_all() -> None:
    problem = device_problem(local_rank=1, visible=1)
    assert problem is not None
    assert "number 1 of its node" in problem
    assert "--gpus-per-node" in problem


@pytest.mark.parametrize("local_rank", [0, 7])
def test_a_rank_takes_the_gpu_of_its_number(local_rank: int) -> None:
    assert device_problem(local_rank, visible=8) is None


def test_another_number_of_ranks_than_configured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MEGATRON_RL_LAUNCH": "a"}.items():
        monkeypatch.setenv(name, value)
    cfg = ParallelConfig(tensor_model_parallel_size=2, data_parallel_size=1)
    with pytest.raises(DistributedError, match="3 processes were started, but section `parallel` needs 2: tensor 2 x"):
        initialize(this_rank(), cfg, seed=1, timeout_s=1.0)
