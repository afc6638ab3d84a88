"""Training state that was on the host in between is the state that never left, for every optimizer of Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.spec import LossSpec
from tests.parallel.launch import run_ranks
from tests.parallel.policy_setup import DP2, EP2, VPP2, layout, local_part, make_batch, make_config
from tests.tiny import tiny_model

pytestmark = pytest.mark.parallel

VOCAB = 300
STEPS = 3
WHOLE = {"use_distributed_optimizer": False}
KINDS = {
    "distributed": (DP2 | EP2, "float32"),
    "distributed_bf16": (DP2, "bfloat16"),
    "whole": (DP2 | EP2 | WHOLE, "float32"),
    "whole_bf16": (DP2 | WHOLE, "bfloat16"),
    "interleaved_bf16": (VPP2, "bfloat16"),
}


def check_all(path: str, runs: str) -> dict[str, dict[str, Any]]:
    """In a rank: every kind of optimizer."""
    from megatron_rl.policy import distributed

    found = {}
    for name, (parallel, dtype) in KINDS.items():
        cfg = make_config(path, parallel, dtype, optimizer={"lr": 1e-2, "clip_grad": 1.0, "weight_decay": 0.1})
        with layout(cfg) as dp_rank:
            found[name] = _compare(cfg, dp_rank, Path(runs) / name)
    distributed.shutdown()
    return found


def _compare(cfg: Any, dp_rank: int, run: Path) -> dict[str, Any]:
    from megatron_rl.policy.policy import Policy

    stays, leaves = Policy.build(cfg), Policy.build(cfg)
    found: dict[str, Any] = {"freed": [leaves.memory.to_host()], "empty": [], "same": [], "log_probs": []}
    leaves.memory.to_device()
    for step in range(STEPS):
        batch, plan = local_part(make_batch(VOCAB, seed=step), cfg, dp_rank)
        old = stays.log_probs(batch, plan).log_probs + np.float32(0.1)
        batch = batch.with_arrays(old_log_probs=old)
        for policy in (stays, leaves):
            policy.train_step(batch, plan, LossSpec())
        if step == STEPS - 1:
            found["trained"] = _bits(stays) == _bits(leaves)
        before, tensors = _bits(leaves), _training_tensors(leaves)
        found["freed"].append(leaves.memory.to_host())
        found["empty"].append([tensor.untyped_storage().nbytes() for tensor in tensors])
        found["log_probs"].append(
            (leaves.log_probs(batch, plan).log_probs == stays.log_probs(batch, plan).log_probs).all()
        )
        leaves.memory.to_device()
        found["same"].append(_bits(leaves) == before and _same_objects(tensors, _training_tensors(leaves)))
    found["gradients"] = all(not bool(b.grad_data.any()) for b in _buffers(leaves))
    found["expected"] = _training_bytes(leaves)
    found["read_back"] = _read_back(cfg, leaves, run)
    return found


def _read_back(cfg: Any, policy: Any, run: Path) -> bool:
    """A checkpoint's reader leaves tensors in memory that cannot be resized."""
    from megatron_rl.policy.policy import Policy

    run.mkdir(exist_ok=True)
    (run / "checkpoints").mkdir(exist_ok=True)
    folder = policy.save(run, 1, {}, None)
    other = Policy.build(cfg)
    other.load(folder)
    before = _bits(other)
    other.memory.to_host()
    other.memory.to_device()
    return _bits(other) == before


def _inner(policy: Any) -> list[Any]:
    return [part.optimizer for part in policy.optimizer.parts if getattr(part, "optimizer", None) is not None]


def _states(policy: Any) -> list[Any]:
    return [value for inner in _inner(policy) for state in inner.state.values() for value in state.values()]


def _main_weights(policy: Any) -> list[Any]:
    """The fp32 copies, which an fp32 model does not have."""
    own = {parameter.untyped_storage().data_ptr() for chunk in policy.chunks for parameter in chunk.parameters()}
    found = [p for inner in _inner(policy) for group in inner.param_groups for p in group["params"]]
    return [p for p in found if p.untyped_storage().data_ptr() not in own]


def _training_tensors(policy: Any) -> list[Any]:
    gradients = [p.main_grad for chunk in policy.chunks for p in chunk.parameters()]
    return [*_states(policy), *_main_weights(policy), *gradients]


def _same_objects(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def _buffers(policy: Any) -> list[Any]:
    """Those of experts as well."""
    return [buffer for chunk in policy._wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _training_bytes(policy: Any) -> int:
    tensors = [*_states(policy), *_main_weights(policy), *(buffer.grad_data for buffer in _buffers(policy))]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


def _bits(policy: Any) -> list[bytes]:
    """Weights, main weights and optimizer state, to the last bit."""
    import torch

    weights = [p.detach() for chunk in policy.chunks for p in chunk.parameters()]
    tensors = [*weights, *_main_weights(policy), *_states(policy)]
    return [t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    path = tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", vocab_size=VOCAB, layers=4, tied=True)
    return run_ranks(2, check_all, str(path), str(tmp_path_factory.mktemp("runs")), timeout=300)


@pytest.mark.parametrize("kind", KINDS)
def test_state_comes_back_to_the_last_bit_and_training_goes_on_as_if_it_had_stayed(
    ranks: list[dict[str, dict[str, Any]]], kind: str
) -> None:
    for found in (rank[kind] for rank in ranks):
        assert found["same"] == [True] * STEPS
        assert found["trained"]
        assert found["gradients"]  # cleared, as every update begins
        assert found["read_back"]


@pytest.mark.parametrize("kind", KINDS)
def test_its_memory_is_really_given_up_and_log_probs_need_none_of_it(
    ranks: list[dict[str, dict[str, Any]]], kind: str
) -> None:
    for found in (rank[kind] for rank in ranks):
        assert all(size == 0 for sizes in found["empty"] for size in sizes)
        assert found["log_probs"] == [True] * STEPS
        assert found["freed"][-1] == found["expected"] > found["freed"][0] > 0  # Adam has no state before it begins
