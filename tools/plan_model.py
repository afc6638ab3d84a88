#!/usr/bin/env python3
"""Builds every distinct shard of a configuration's model without memory for its weights; compares it with the plan.

One process stands for one rank after the other: the process group is as large as the run's but has no peers, and
parameters are on torch's meta device. Needs the model's config.json and seconds, whatever the model's size.

    python tools/plan_model.py configs/qwen3_235b_a22b_gspo.yaml run_dir=x data.prompts=x model.path=DIR
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config import Config, ConfigError, HfConfig, load_config
from megatron_rl.config.checks import check
from megatron_rl.config.plan_memory import stage_memory, width_of
from megatron_rl.config.shards import Shard, shard


@dataclass(frozen=True)
class Built:
    """Parameters of one rank, as Megatron makes them and as the plan counts them."""

    stage: int
    rank: int
    layers: int
    built: Shard
    planned: Shard


def main() -> int:
    """Print one line for each shard; 1 when one of them is not as planned, 2 when the configuration cannot run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)  # of packages that only a GPU needs
    try:
        cfg = load_config(arguments.config, arguments.overrides)
        hf = check(cfg, with_files=False)
    except ConfigError as error:
        print(f"plan_model: {error}", file=sys.stderr)
        return 2
    wrong = 0
    for found in built_shards(cfg, hf):
        peak = stage_memory(cfg, hf, found.stage).peak / 2**30
        size = found.built.total * width_of(cfg) / 2**30
        print(
            f"stage {found.stage:2d} rank {found.rank:4d}: {found.layers:3d} layers, {found.built.total:,} parameters "
            f"({found.built.expert:,} of experts), {size:.3f} GiB; peak of the plan {peak:.1f} GiB"
        )
        if found.built != found.planned:
            wrong += 1
            print(f"    NOT AS PLANNED: {found.planned}")
    print("NOT as planned" if wrong else "every shard is as planned")
    return 1 if wrong else 0


def built_shards(cfg: Config, hf: HfConfig) -> Iterator[Built]:
    """First and last rank of every pipeline stage: between them all tensor- and expert-parallel ranks are alike."""
    of_stage = (cfg.parallel.world_size or 1) // cfg.parallel.pipeline_model_parallel_size
    for stage in range(cfg.parallel.pipeline_model_parallel_size):
        for rank in sorted({stage * of_stage, (stage + 1) * of_stage - 1}):
            layers, built = _build(cfg, hf, rank)
            yield Built(stage, rank, layers, built, shard(hf, cfg.model, cfg.parallel, stage))


def _build(cfg: Config, hf: HfConfig, rank: int) -> tuple[int, Shard]:
    import torch

    from megatron_rl.policy.model import build_model

    with _as_rank(cfg, rank), torch.device("meta"):
        chunks = build_model(hf, cfg.model, cfg.parallel)
    dense = expert = 0
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".mlp.experts." in name:
                expert += parameter.numel()
            else:
                dense += parameter.numel()
    return sum(len(chunk.decoder.layers) for chunk in chunks), Shard(dense, expert)


@contextmanager
def _as_rank(cfg: Config, rank: int) -> Iterator[None]:
    """Megatron's parallel state of this rank of the run, over a process group without peers."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_rl import cpu_backend

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # shapes only: no device is needed
    cpu_backend.install()
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=cfg.parallel.world_size or 1)
    try:
        parallel_state.initialize_model_parallel(
            **cfg.parallel.group_sizes,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(cfg.seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
