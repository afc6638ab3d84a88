"""On GPUs: experts as Transformer Engine computes them, all of a rank in one grouped product, over packed sequences in
bf16, give the log-probs and the gradient of transformers in fp32 within what bf16 loses; so they do over two ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.policy.batch import SequenceBatch
from megatron_rl.policy.layer_spec import has_transformer_engine
from tests.gpu.models import WITH_EXPERTS
from tests.parallel.launch import run_ranks
from tests.parallel.policy_setup import (
    DP2,
    EP2,
    gradients,
    layout,
    local_part,
    make_batch,
    make_config,
    saved_gradients,
)
from tests.tiny import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_transformer_engine(), reason="needs Transformer Engine"),
]

NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a CUDA device for each of two ranks")
VOCAB = 300
SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "initializer_range": 0.05}
WORK = [
    *(pytest.param((family, {}), id=family) for family in WITH_EXPERTS),
    *(
        pytest.param((family, DP2 | EP2), id=f"{family}-ep2", marks=NEEDS_TWO)
        for family in ("qwen3_moe", "deepseek_v3")
    ),
]
"""Families, and how their experts are dealt out. NCCL refuses two ranks on one device."""


@dataclass(frozen=True)
class Both:
    """Log-probs of the whole batch, gradients by name and their norm, ours and the expected ones."""

    log_probs: tuple[np.ndarray, np.ndarray]
    gradients: tuple[dict[str, np.ndarray], dict[str, np.ndarray]]
    experts: list[str]
    """Classes of our expert modules."""


@dataclass(frozen=True)
class Found:
    """Of one rank."""

    log_probs: dict[int, np.ndarray]
    """By sequence."""
    gradients: dict[str, np.ndarray]
    experts: list[str]
    """Classes of the expert modules."""


def of_policy(path: Path, parallel: dict[str, Any], dtype: str = "bfloat16") -> Found:
    """In a rank: log-probs, and the gradient of a loss at ratio 1."""
    from megatron_rl.policy import distributed
    from megatron_rl.policy.policy import Policy

    cfg = make_config(path, parallel, dtype)
    with layout(cfg) as dp_rank:
        policy = Policy.build(cfg)
        batch, plan = local_part(whole_batch(), cfg, dp_rank, max_tokens=96)
        log_probs = policy.log_probs(batch, plan).log_probs
        policy.train_step(batch.with_arrays(old_log_probs=log_probs), plan, LossSpec())
        modules = policy.chunks[0].named_modules()
        found = Found(
            dict(zip(plan.sequences(dp_rank), np.split(log_probs, batch.offsets[1:-1]), strict=True)),
            gradients(policy),
            [type(part).__name__ for name, part in modules if name.endswith(".experts")],
        )
    distributed.shutdown()
    return found


def whole_batch() -> SequenceBatch:
    return make_batch(VOCAB, masked=())


@pytest.fixture(scope="module", params=WORK)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    family, parallel = request.param
    path = tiny_model(tmp_path_factory.mktemp("model"), family, vocab_size=VOCAB, **SHAPE, **WITH_EXPERTS[family])
    ranks = run_ranks(parallel.get("data_parallel_size", 1), of_policy, path, parallel, timeout=300)
    expected, theirs = _of_transformers(path, whole_batch())
    by_sequence = {i: values for rank in ranks for i, values in rank.log_probs.items()}
    found = np.concatenate([by_sequence[i] for i in sorted(by_sequence)])
    ours = {name: values for rank in ranks for name, values in rank.gradients.items()}
    return Both((found, expected), (ours, theirs), [name for rank in ranks for name in rank.experts])


def _of_transformers(path: Path, batch: SequenceBatch) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Its log-probs, and the gradient of a loss at ratio 1."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    log_probs = []
    for i, (start, end) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:], strict=True)):
        ids = torch.from_numpy(batch.tokens[start:end])
        scores = (model(ids[None]).logits[0, :-1] / float(batch.temperature[i])).log_softmax(-1)
        log_probs += [torch.zeros(1), scores.gather(1, ids[1:, None]).squeeze(1)]
    joined = torch.cat(log_probs)
    (-joined * torch.from_numpy(batch.advantages * batch.weights)).sum().backward()
    return np.where(batch.mask, joined.detach(), 0), saved_gradients(model, path / "gradients")


def test_experts_of_a_rank_are_one_grouped_product(both: Both) -> None:
    assert set(both.experts) == {"TEGroupedMLP"}


def test_log_probs_are_near_those_of_transformers(both: Both) -> None:
    found, expected = both.log_probs
    assert np.abs(found - expected).mean() <= 0.05


def test_the_gradient_points_where_that_of_transformers_does(both: Both) -> None:
    found, expected = both.gradients
    assert found.keys() == expected.keys()
    ours, theirs = (np.concatenate([of[name].ravel() for name in expected]) for of in (found, expected))
    norms = np.linalg.norm(ours), np.linalg.norm(theirs)
    assert norms[0] == pytest.approx(norms[1], rel=0.1)
    assert ours @ theirs / np.prod(norms) >= 0.95
