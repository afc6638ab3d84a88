"""On a GPU: weights of Transformer Engine's grouped experts leave as they came; training resumes with fused Adam."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.algorithms.spec import LossSpec
from tests.parallel.launch import run_ranks
from tests.parallel.policy_setup import layout, local_part, make_batch, make_config
from tests.tiny import tiny_model

pytestmark = pytest.mark.gpu

VOCAB = 320
SIZES = {"head_dim": 64, "moe_intermediate_size": 128, "mlp_only_layers": [1]}


@dataclass
class Found:
    """Names of tensors that are not the source's, rounded; the same of a version in fp8 blocks; losses and norms."""

    wrong: list[str] = field(default_factory=list)
    wrong_in_fp8: list[str] = field(default_factory=list)
    went_on: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)


def run(path: Path, folder: Path) -> Found:
    """In the only rank."""
    from megatron_rl.policy import distributed
    from megatron_rl.policy.policy import Policy
    from megatron_rl.weights.export import export_hf_weights

    cfg, found = make_config(path, None, "bfloat16", optimizer={"lr": 1e-2, "clip_grad": 1.0}), Found()
    with layout(cfg):
        policy = Policy.build(cfg)
        source = {name: tensor.bfloat16() for name, tensor in load_file(path / "model.safetensors").items()}
        exported = dict(export_hf_weights(policy.chunks, policy.hf))
        found.wrong = [name for name in source if not torch.equal(exported[name].cpu(), source[name])]
        found.wrong_in_fp8 = wrong_in_fp8(policy, source, path, folder)
        train(policy, cfg, range(2))
        saved = policy.save(folder, 2, {}, None)
        found.went_on = train(policy, cfg, range(2, 4))
        other = Policy.build(cfg)
        other.load(saved)
        found.resumed = train(other, cfg, range(2, 4))
    distributed.shutdown()
    return found


def wrong_in_fp8(policy: Any, source: dict[str, torch.Tensor], path: Path, folder: Path) -> list[str]:
    """Blocks that differ from those that the CPU makes of the source."""
    from megatron_rl.weights.fp8 import FP8, SUFFIX, quantise
    from megatron_rl.weights.version_dir import write_version

    version = write_version(policy.chunks, policy.hf, path, folder / "fp8", FP8)
    stored = {name: tensor for file in version.glob("*.safetensors") for name, tensor in load_file(file).items()}
    matrices = [name for name in source if name + SUFFIX in stored]
    assert any(".experts." in name for name in matrices)
    pairs = {name: quantise(source[name]) for name in matrices}
    return [
        name
        for name, (values, scales) in pairs.items()
        if not (torch.equal(stored[name].float(), values.float()) and torch.equal(stored[name + SUFFIX], scales))
    ]


def train(policy: Any, cfg: Any, steps: range) -> list[float]:
    found = []
    for step in steps:
        batch, plan = local_part(make_batch(VOCAB, seed=step), cfg, 0)
        old = policy.log_probs(batch, plan).log_probs + np.float32(0.1)
        metrics = policy.train_step(batch.with_arrays(old_log_probs=old), plan, LossSpec())
        found += [metrics["policy/loss"], metrics["optimizer/grad_norm"]]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("experts")
    path = tiny_model(folder / "model", "qwen3_moe", vocab_size=VOCAB, **SIZES)
    return run_ranks(1, run, path, folder, timeout=300)[0]


def test_weights_go_out_as_they_came(found: Found) -> None:
    assert found.wrong == []


def test_blocks_of_fp8_are_those_that_a_cpu_makes(found: Found) -> None:
    assert found.wrong_in_fp8 == []


def test_training_resumes_where_it_was(found: Found) -> None:
    assert found.resumed == pytest.approx(found.went_on, rel=2e-2, abs=2e-3)
