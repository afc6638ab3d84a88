"""On a GPU: the memory of the training state is really free for other processes, and comes back to the last bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.cluster.bootstrap import find_place
from tests.parallel.policy_setup import local_part, make_batch, make_config
from tests.tiny import tiny_model

pytestmark = pytest.mark.gpu

VOCAB = 32_000


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One rank with a bf16 model of about 70 million parameters, trained for one step."""
    from megatron_rl.policy import distributed
    from megatron_rl.policy.policy import Policy

    sizes = {"hidden_size": 1024, "intermediate_size": 4096}
    path = tiny_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, layers=2, **sizes)
    cfg = make_config(path, None, "bfloat16")
    saved = dict(os.environ)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    try:
        distributed.initialize(find_place(os.environ, Path()), cfg.parallel, seed=1, timeout_s=60)
        policy = Policy.build(cfg)
        _train(policy, cfg, seed=0)
        yield policy, cfg
    finally:
        distributed.shutdown()
        os.environ.clear()
        os.environ.update(saved)


def _train(policy: Any, cfg: Any, seed: int) -> None:
    batch, plan = local_part(make_batch(VOCAB, seed=seed), cfg, 0)
    old = policy.log_probs(batch, plan).log_probs + np.float32(0.1)
    policy.train_step(batch.with_arrays(old_log_probs=old), plan, LossSpec())


def _state(policy: Any) -> list[torch.Tensor]:
    inner = [part.optimizer for part in policy.optimizer.parts]
    values = [value for one in inner for state in one.state.values() for value in state.values()]
    return [*values, *(p for one in inner for group in one.param_groups for p in group["params"])]


def test_the_device_gets_the_memory_and_the_state_comes_back_bit_by_bit(policy: Any) -> None:
    policy, cfg = policy
    before = [tensor.detach().clone().cpu() for tensor in _state(policy)]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    moved = policy.memory.to_host()
    parameters = sum(p.numel() for chunk in policy.chunks for p in chunk.parameters())
    assert moved >= 16 * parameters  # fp32: two moments, main weights, gradients
    freed = torch.cuda.mem_get_info()[0] - free
    assert freed >= 0.95 * moved
    policy.memory.to_device()
    assert all(torch.equal(a, b.cpu()) for a, b in zip(before, _state(policy), strict=True))
    _train(policy, cfg, seed=1)


def test_host_memory_is_pinned_and_used_again(policy: Any) -> None:
    policy, _ = policy
    policy.memory.to_host()
    first = {m.host.data_ptr() for m in policy.memory._moved if m.host is not None}
    assert all(m.host.is_pinned() for m in policy.memory._moved if m.host is not None)
    policy.memory.to_device()
    policy.memory.to_host()
    assert {m.host.data_ptr() for m in policy.memory._moved if m.host is not None} == first
    policy.memory.to_device()
