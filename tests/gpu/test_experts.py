"""On a GPU: experts as Transformer Engine computes them, all of a rank in one grouped product, over packed sequences in
bf16, give the log-probs and the gradient of transformers in fp32 within what bf16 loses.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.config import Config
from megatron_rl.policy.batch import SequenceBatch
from megatron_rl.policy.layer_spec import has_transformer_engine
from megatron_rl.policy.microbatch import Plan
from tests.parallel.launch import run_ranks
from tests.parallel.policy_setup import gradients, layout, local_part, make_batch, make_config, saved_gradients
from tests.tiny import Family, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_transformer_engine(), reason="needs Transformer Engine"),
]

VOCAB = 300
SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "initializer_range": 0.05}
SHAPES: dict[Family, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 64, "moe_intermediate_size": 128},
    "mixtral": {"head_dim": 64, "intermediate_size": 128},
    "deepseek_v3": {
        "moe_intermediate_size": 128,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}


@dataclass(frozen=True)
class Both:
    """Log-probs of the whole batch, gradients by name and their norm, ours and the expected ones."""

    log_probs: tuple[np.ndarray, np.ndarray]
    gradients: tuple[dict[str, np.ndarray], dict[str, np.ndarray]]
    experts: list[str]
    """Classes of our expert modules."""


def of_policy(path: Path) -> tuple[np.ndarray, dict[str, np.ndarray], list[str]]:
    """In a rank: log-probs, the gradient of a loss at ratio 1, and the classes of the expert modules."""
    from megatron_rl.policy.policy import Policy

    cfg, batch, plan = _work(path)
    with layout(cfg):
        policy = Policy.build(cfg)
        log_probs = policy.log_probs(batch, plan).log_probs
        policy.train_step(batch.with_arrays(old_log_probs=log_probs), plan, LossSpec())
        modules = policy.chunks[0].named_modules()
        return (
            log_probs,
            gradients(policy),
            [type(part).__name__ for name, part in modules if name.endswith(".experts")],
        )


def _work(path: Path) -> tuple[Config, SequenceBatch, Plan]:
    cfg = make_config(path, None, "bfloat16")
    return cfg, *local_part(make_batch(VOCAB, masked=()), cfg, 0, max_tokens=96)


@pytest.fixture(scope="module", params=SHAPES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    family = request.param
    path = tiny_model(tmp_path_factory.mktemp("model"), family, vocab_size=VOCAB, **SHAPE, **SHAPES[family])
    ((found, ours, experts),) = run_ranks(1, of_policy, path, timeout=300)
    expected, theirs = _of_transformers(path, _work(path)[1])
    return Both((found, expected), (ours, theirs), experts)


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
