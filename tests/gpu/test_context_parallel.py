"""On GPUs: context parallelism over packed sequences is the update of one rank, with every exchange that is installed.

Transformer Engine attends in bf16 there; without it, our own attention in fp32. Two devices are needed, since NCCL
refuses two ranks on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.policy.layer_spec import PACKED_EXCHANGES, exchange_problem, has_transformer_engine
from tests.parallel.launch import run_ranks
from tests.parallel.policy_setup import CP2, DP2, gradients, layout, local_part, make_batch, make_config
from tests.tiny import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a CUDA device for each of two ranks"),
]

VOCAB = 300
SHAPE = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
SPEC = LossSpec(kind="gspo", eps_low=0.5, eps_high=0.5)
ALONE = "one rank"


@dataclass(frozen=True)
class Found:
    """Of one rank in one layout."""

    log_probs: dict[int, np.ndarray]
    """By sequence."""
    gradients: dict[str, np.ndarray]
    grad_norm: float


def run_layouts(path: str, dtype: str, exchanges: Sequence[str]) -> dict[str, Found]:
    """In a rank: by itself, with each exchange, and beside another replica."""
    from megatron_rl.policy import distributed

    layouts: dict[str, dict[str, Any]] = {ALONE: {}}
    layouts |= {name: CP2 | {"context_parallel_exchange": name} for name in exchanges} | {"DP2": DP2}
    found = {name: _update(path, dtype, parallel, name == ALONE) for name, parallel in layouts.items()}
    distributed.shutdown()
    return found


def _update(path: str, dtype: str, parallel: dict[str, Any], alone: bool) -> Found:
    from megatron_rl.policy.policy import Policy

    cfg = make_config(path, parallel, dtype)
    with layout(cfg, alone) as dp_rank:
        policy = Policy.build(cfg)
        batch, plan = local_part(make_batch(VOCAB), cfg, dp_rank, max_tokens=96)
        log_probs = policy.log_probs(batch, plan).log_probs
        result = policy.train_step(batch.with_arrays(old_log_probs=log_probs), plan, SPEC)
        sequences = dict(zip(plan.sequences(dp_rank), np.split(log_probs, batch.offsets[1:-1]), strict=True))
        return Found(sequences, gradients(policy), result.grad_norm)


def installed_exchanges() -> list[str]:
    if not has_transformer_engine():
        return ["p2p"]  # whatever it is called, keys and values are gathered
    from megatron.core.utils import get_te_version

    version = get_te_version().release
    return [name for name in PACKED_EXCHANGES if exchange_problem(name, version, latent=False) is None]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    folder: Path = tmp_path_factory.mktemp("model")
    path = tiny_model(folder, vocab_size=VOCAB, layers=2, **SHAPE)
    dtype = "bfloat16" if has_transformer_engine() else "float32"
    return run_ranks(2, run_layouts, str(path), dtype, installed_exchanges(), timeout=600)


def test_log_probs_are_those_of_one_rank(ranks: list[dict[str, Found]]) -> None:
    expected = ranks[0][ALONE].log_probs
    tolerance = 0.05 if has_transformer_engine() else 1e-5
    for name in installed_exchanges():
        for rank in ranks:
            assert rank[name].log_probs.keys() == expected.keys()
            for sequence, values in rank[name].log_probs.items():
                assert np.abs(values - expected[sequence]).mean() <= tolerance, (name, sequence)


def test_gradients_are_those_of_one_rank(ranks: list[dict[str, Found]]) -> None:
    """In bf16 not much farther away than those of two replicas, which attend as one rank does."""
    expected = ranks[0][ALONE]
    usual = max(_distance(ranks[0]["DP2"], expected).values())
    for name in installed_exchanges():
        for rank in ranks:
            distances = _distance(rank[name], expected)
            assert max(distances.values()) <= max(5 * usual, 1e-4), (name, distances)
            assert rank[name].grad_norm == pytest.approx(expected.grad_norm, rel=0.02)


def _distance(found: Found, expected: Found) -> dict[str, float]:
    """Norm of the difference over the norm, of each tensor."""
    assert found.gradients.keys() == expected.gradients.keys()
    return {
        name: float(np.linalg.norm(values - expected.gradients[name]) / np.linalg.norm(expected.gradients[name]))
        for name, values in found.gradients.items()
    }
