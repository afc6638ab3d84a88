"""On GPUs: context parallelism over packed sequences is the update of one rank, with every exchange that is installed.

Transformer Engine attends in bf16 there; without it, our own attention in fp32. With experts, too, and with latent
attention, whose keys and values are exchanged in other ways. Needs two devices: NCCL refuses two ranks on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.policy.layer_spec import PACKED_EXCHANGES, exchange_problem, has_transformer_engine
from tests.gpu.models import WITH_EXPERTS
from tests.parallel.launch import run_ranks
from tests.parallel.policy_setup import CP2, DP2, gradients, layout, local_part, make_batch, make_config
from tests.tiny import Family, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a CUDA device for each of two ranks"),
]

VOCAB = 300
SHAPE = {"hidden_size": 512, "num_attention_heads": 8, "initializer_range": 0.05}
FAMILIES: dict[Family, dict[str, Any]] = {
    "qwen3": {"intermediate_size": 512, "num_key_value_heads": 4},
    "qwen3_moe": WITH_EXPERTS["qwen3_moe"] | {"num_key_value_heads": 4},
    "deepseek_v3": WITH_EXPERTS["deepseek_v3"] | {"num_key_value_heads": 8},
}
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
        return Found(sequences, gradients(policy), result["optimizer/grad_norm"])


def installed_exchanges(latent: bool) -> list[str]:
    if not has_transformer_engine():
        return ["p2p"]  # whatever it is called, keys and values are gathered
    from megatron.core.utils import get_te_version

    version = get_te_version().release
    return [name for name in PACKED_EXCHANGES if exchange_problem(name, version, latent) is None]


@dataclass(frozen=True)
class Compared:
    """One model: what each rank found in each layout, and the exchanges among these."""

    ranks: list[dict[str, Found]]
    exchanges: list[str]
    has_experts: bool


@pytest.fixture(scope="module", params=FAMILIES)
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    family = request.param
    path = tiny_model(tmp_path_factory.mktemp("model"), family, vocab_size=VOCAB, layers=2, **SHAPE, **FAMILIES[family])
    dtype = "bfloat16" if has_transformer_engine() else "float32"
    exchanges = installed_exchanges(latent=family == "deepseek_v3")
    found = run_ranks(2, run_layouts, str(path), dtype, exchanges, timeout=600)
    return Compared(found, exchanges, family in WITH_EXPERTS)


def test_log_probs_are_those_of_one_rank(compared: Compared) -> None:
    expected = compared.ranks[0][ALONE].log_probs
    tolerance = 0.05 if has_transformer_engine() else 1e-5
    for name in compared.exchanges:
        for rank in compared.ranks:
            assert rank[name].log_probs.keys() == expected.keys()
            for sequence, values in rank[name].log_probs.items():
                assert np.abs(values - expected[sequence]).mean() <= tolerance, (name, sequence)


def test_gradients_are_those_of_one_rank(compared: Compared) -> None:
    """In bf16 not much farther away than those of two replicas, which attend as one rank does."""
    ranks, expected = compared.ranks, compared.ranks[0][ALONE]
    usual = max(_distance(ranks[0]["DP2"], expected).values())
    for name in compared.exchanges:
        for rank in ranks:
            assert rank[name].grad_norm == pytest.approx(expected.grad_norm, rel=0.02)
            if compared.has_experts and has_transformer_engine():
                # Rounding alone sends a few tokens to other experts, whose gradients are small sums.
                assert _alignment(rank[name], expected) >= 0.98, name
            else:
                distances = _distance(rank[name], expected)
                assert max(distances.values()) <= max(5 * usual, 1e-4), (name, distances)


def _distance(found: Found, expected: Found) -> dict[str, float]:
    """Norm of the difference over the norm, of each tensor; an expert without tokens has no gradient."""
    assert found.gradients.keys() == expected.gradients.keys()
    return {
        name: float(np.linalg.norm(values - expected.gradients[name]) / (np.linalg.norm(expected.gradients[name]) or 1))
        for name, values in found.gradients.items()
    }


def _alignment(found: Found, expected: Found) -> float:
    """Cosine between the gradients as a whole."""
    assert found.gradients.keys() == expected.gradients.keys()
    ours, theirs = (
        np.concatenate([of.gradients[name].ravel() for name in expected.gradients]) for of in (found, expected)
    )
    return float(ours @ theirs / (np.linalg.norm(ours) * np.linalg.norm(theirs)))
