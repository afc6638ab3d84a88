"""Configurations, batches and gathered gradients for the tests of `megatron_rl.policy`; holds no tests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.config import Config
from megatron_rl.policy.batch import SequenceBatch
from megatron_rl.policy.microbatch import Plan
from megatron_rl.policy.step_batch import plan_lengths
from tests.parallel.launch import this_rank

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_rl.policy.policy import Policy

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
DP2 = {"data_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
EP4 = {"expert_model_parallel_size": 4}
ETP2 = {"expert_tensor_parallel_size": 2}
DP4 = {"data_parallel_size": 4}
SP = {"sequence_parallel": True}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
FROZEN = "e_score_correction_bias"
"""What is exported beside the parameters, and has no gradient."""


def make_config(
    path: Path | str, parallel: dict[str, Any] | None = None, dtype: str = "float32", **sections: dict[str, Any]
) -> Config:
    """A configuration for the policy alone; sections that it does not read are filled with what validates."""
    base: dict[str, Any] = {
        "run_dir": "unused",
        "model": {"path": str(path), "dtype": dtype},
        "parallel": parallel or {},
        "data": {"prompts": "unused.jsonl"},
        "reward": {"components": [{"name": "exact"}]},
        "optimizer": {"lr": 1e-3, "clip_grad": 0.0},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Config(**base)


def make_batch(
    vocab_size: int,
    seed: int = 0,
    count: int = 9,
    masked: Sequence[int] = (2,),
    lengths: Sequence[int] | np.ndarray | None = None,
) -> SequenceBatch:
    """`count` uneven sequences, or those of `lengths`; prompts masked, the samples `masked` as a whole, advantages that
    do not cancel."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 24, size=count) if lengths is None else lengths
    count = len(lengths)
    # Not id 0: transformers keeps the padding token's embedding, and its gradient, at zero.
    sequences = [rng.integers(1, vocab_size, size=n) for n in lengths]
    masks = [np.arange(n) >= rng.integers(1, max(n - 2, 2)) for n in lengths]
    for i in masked:
        masks[i][:] = False
    mask = np.concatenate(masks)
    return SequenceBatch.from_sequences(
        sequences,
        masks,
        [f"s{i}" for i in range(count)],
        temperature=np.where(np.arange(count) % 2, 0.7, 1.0),
        advantages=rng.normal(0.3, 1.0, size=mask.size).astype(np.float32),
        weights=np.where(mask, 1.0 / mask.sum(), 0.0).astype(np.float32),
    )


def local_part(batch: SequenceBatch, cfg: Config, dp_rank: int, max_tokens: int = 64) -> tuple[SequenceBatch, Plan]:
    """The plan of a whole batch and the sequences of one data-parallel rank."""
    algorithm = cfg.algorithm.model_copy(update={"max_tokens_per_microbatch": max_tokens})
    plan = plan_lengths(batch.lengths, cfg.model_copy(update={"algorithm": algorithm}))
    return batch.select(plan.sequences(dp_rank)), plan


@contextmanager
def layout(cfg: Config, alone: bool = False) -> Iterator[int]:
    """Megatron's groups for `cfg.parallel` within a rank of `run_ranks`; yields the data-parallel rank.

    The process group of all ranks is made once and stays, so that several layouts follow each other in one launch; end
    with `distributed.shutdown()`. With `alone` (before any other layout) this rank is a world of its own.
    """
    from megatron.core import parallel_state

    from megatron_rl.policy import distributed

    saved = dict(os.environ)
    if alone:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_PORT="0")
    try:
        distributed.initialize(this_rank(), cfg.parallel, seed=1, timeout_s=60)
        yield parallel_state.get_data_parallel_rank()
        if alone:
            distributed.shutdown()
        else:
            parallel_state.destroy_model_parallel()
    finally:
        os.environ.clear()
        os.environ.update(saved)


def gradients(policy: Policy) -> dict[str, Any]:
    """Gradient of this pipeline stage's parameters by Hugging Face name, whole tensors; call it after an update.

    Gradients travel through the export of weights, which only moves and joins numbers.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_rl.weights.export import export_hf_weights

    shared = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_group()
    for chunk in policy._wrapped:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        # Each rank has the sum of its own share only.
        for group, parts in ((shared, chunk.bucket_groups), (experts, chunk.expert_parallel_bucket_groups)):
            for bucket in (bucket for part in parts for bucket in part.buckets):
                mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)
    parameters = [parameter for chunk in policy.chunks for parameter in chunk.parameters()]
    held = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.main_grad)
        exported = export_hf_weights(policy.chunks, policy.hf)
        result = {n: tensor.float().clone().numpy() for n, tensor in exported if not n.endswith(FROZEN)}
        for parameter, values in zip(parameters, held, strict=True):
            parameter.copy_(values)
    return result


def saved_gradients(model: Any, folder: Path) -> dict[str, Any]:
    """The gradients of a transformers model under the names of checkpoints, where each expert has its own tensors."""
    from safetensors.torch import load_file

    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.save_pretrained(folder, state_dict=found)
    return {name: tensor.numpy() for name, tensor in load_file(folder / "model.safetensors").items()}
