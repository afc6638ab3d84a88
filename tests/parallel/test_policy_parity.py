"""Loss, gradients, metrics and log-probs do not depend on how the work is split, and are those of transformers.

The reference is computed in the test's own process: transformers' model, one sequence after another, and autograd.
Every family is tried alone and split, experts in every layout of theirs; what else is combined with the layouts of a
dense model is compared with one rank in test_layouts.py. Each scaling that `policy/forward.py` switches off would show
here: sums over data-parallel ranks and micro-batches would become means. So would gradients of experts that are summed
over the group of the others, and a gradient norm that counts the experts of one expert-parallel rank only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.policy.batch import SequenceBatch
from tests.parallel.dense_models import LAYOUTS, YARN_ROPE
from tests.parallel.dense_models import MODELS as DENSE_MODELS
from tests.parallel.launch import run_ranks
from tests.parallel.policy_setup import (
    CP2,
    DP2,
    DP4,
    EP2,
    EP4,
    ETP2,
    PP2,
    SP,
    TP2,
    VPP2,
    gradients,
    layout,
    local_part,
    make_batch,
    make_config,
    saved_gradients,
)
from tests.tiny import MOE_SETTINGS, tiny_model
from tests.worst import worst

pytestmark = pytest.mark.parallel

VOCAB = 300  # not a multiple of 128: the embedding is padded
SPEC = LossSpec(dual_clip=3.0, kl_coef=0.1, entropy_coef=0.01)
LENGTHS = (5, 1, 14, 9, 9, 22, 3, 2, 7, 4, 23, 12)
"""A sequence without a row, of one and of two rows, equal and skewed ones; 24 tokens hold few of them, or just one."""
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """One way to split the same update. `max_tokens` of 24 makes several micro-batches per rank."""

    parallel: dict[str, Any]
    model: str = "qwen3"
    max_tokens: int = 256
    alone: bool = False
    dtype: str = "float32"


TWO_RANKS = {
    "one_rank_qwen3": Case({}, alone=True),
    "one_rank_qwen3-tied": Case({}, model="qwen3-tied", alone=True),
    "one_rank_qwen2": Case({}, model="qwen2", alone=True),
    "one_rank_llama": Case({}, model="llama", alone=True),
    "one_rank_mistral": Case({}, model="mistral", alone=True),
    "one_rank_qwen2-yarn": Case({}, model="qwen2-yarn", alone=True),
    "one_rank_qwen3_moe": Case({}, model="qwen3_moe", alone=True),
    "one_rank_mixtral": Case({}, model="mixtral", alone=True),
    "one_rank_deepseek_v2": Case({}, model="deepseek_v2", alone=True),
    "one_rank_deepseek_v3": Case({}, model="deepseek_v3", alone=True),
    "one_rank_glm4_moe": Case({}, model="glm4_moe", alone=True),
    "one_rank_plain_glm": Case({}, model="plain_glm", alone=True),
    "one_rank_some_dense": Case({}, model="some_dense", alone=True),
    "one_rank_direct_queries": Case({}, model="direct_queries", alone=True),
    "one_rank_microbatches": Case({}, max_tokens=24, alone=True),
    "tp2": Case(TP2),
    "tp2_microbatches": Case(TP2, max_tokens=24),
    "tp2_qwen2": Case(TP2, model="qwen2", max_tokens=24),
    "tp2_llama": Case(TP2, model="llama", max_tokens=24),
    "tp2_mistral": Case(TP2, model="mistral"),
    "tp2_qwen2_yarn": Case(TP2, model="qwen2-yarn"),
    "pp2": Case(PP2),
    "pp2_qwen2": Case(PP2, model="qwen2", max_tokens=48),
    "pp2_llama": Case(PP2, model="llama", max_tokens=48),
    "pp2_interleaved": Case(VPP2, max_tokens=24),
    "cp2": Case(CP2),
    "dp2": Case(DP2),
    "dp2_microbatches": Case(DP2, max_tokens=24),
    "tp2_bf16": Case(TP2, dtype="bfloat16"),
    "ep2": Case(DP2 | EP2, "qwen3_moe", max_tokens=24),
    "ep2_whole_optimizer": Case(DP2 | EP2 | {"use_distributed_optimizer": False}, "qwen3_moe"),
    "dp2_experts": Case(DP2, "qwen3_moe", max_tokens=48),
    "tp2_ep2": Case(TP2 | SP | EP2, "qwen3_moe", max_tokens=48),
    "tp2_experts": Case(TP2 | SP, "qwen3_moe"),
    "tp2_etp2": Case(TP2 | SP | ETP2, "qwen3_moe", max_tokens=48),
    "pp2_interleaved_experts": Case(VPP2, "qwen3_moe", max_tokens=24),
    "tp2_ep2_direct_queries": Case(TP2 | SP | EP2, "direct_queries"),
    "mixtral_tp2_ep2": Case(TP2 | SP | EP2, "mixtral"),
    "deepseek_v2_tp2_ep2": Case(TP2 | SP | EP2, "deepseek_v2", max_tokens=48),
    "deepseek_v3_tp2_ep2": Case(TP2 | SP | EP2 | {"recompute": "selective"}, "deepseek_v3", max_tokens=48),
    "deepseek_v3_tp2_etp2": Case(TP2 | SP | ETP2, "deepseek_v3"),
    "cp2_ep2": Case(CP2 | EP2, "qwen3_moe", max_tokens=48),
    "deepseek_v3_cp2": Case(CP2, "deepseek_v3", max_tokens=48),
    "glm4_moe_tp2_ep2": Case(TP2 | SP | EP2, "glm4_moe", max_tokens=48),
    "glm4_moe_cp2_plain": Case(CP2 | EP2, "plain_glm", max_tokens=48),
    "deepseek_v3_pp2": Case(PP2 | {"num_layers_in_first_pipeline_stage": 1}, "deepseek_v3", max_tokens=48),
}
DENSE = (("tp2-pp2", "qwen2"), ("tp2-pp2", "llama"), ("tp4", "qwen3"), ("tp4", "qwen2"), ("tp4", "llama"))
FOUR_RANKS = {
    "ep4": Case(DP4 | EP4, "qwen3_moe", max_tokens=24),
    "dp4_ep2": Case(DP4 | EP2, "qwen3_moe"),
    "tp2_dp2_ep2": Case(TP2 | SP | DP2 | EP2, "qwen3_moe", max_tokens=48),
    "tp2_dp2_ep4": Case(TP2 | SP | DP2 | EP4, "qwen3_moe"),
    "tp2_dp2_etp2_ep2": Case(TP2 | SP | DP2 | ETP2 | EP2, "qwen3_moe", max_tokens=48),
    "pp2_ep2": Case(PP2 | DP2 | EP2, "qwen3_moe", max_tokens=24),
    "tp2_cp2_ep2": Case(TP2 | SP | CP2 | EP2, "qwen3_moe", max_tokens=48),
    "deepseek_v3_tp2_cp2_ep4": Case(TP2 | SP | CP2 | EP4, "deepseek_v3", max_tokens=48),
    "pp2_ep2_interleaved": Case(VPP2 | DP2 | EP2, "qwen3_moe", max_tokens=24),
    "pp2_tp2_ep2": Case(PP2 | TP2 | SP | EP2, "qwen3_moe", max_tokens=48),
    "pp2_ep2_uneven": Case(PP2 | DP2 | EP2 | {"num_layers_in_last_pipeline_stage": 1}, "qwen3_moe", max_tokens=48),
    "mixtral_pp2_ep2": Case(PP2 | DP2 | EP2, "mixtral"),
    "deepseek_v3_pp2_tp2_ep2": Case(PP2 | TP2 | SP | EP2, "deepseek_v3", max_tokens=48),
    **{f"{name}_{model}": Case(LAYOUTS[name], model, max_tokens=48) for name, model in DENSE},
}
"""The launch of two ranks has the unsplit runs."""
BY_SIZE = {2: TWO_RANKS, 4: FOUR_RANKS}
CASES = TWO_RANKS | FOUR_RANKS
EXACT = [name for name, case in CASES.items() if case.dtype == "float32"]


def run_cases(size: int, paths: dict[str, str], batches: dict[str, SequenceBatch]) -> dict[str, Any]:
    """In a rank: every case of so many ranks in turn."""
    from megatron_rl.policy import distributed

    results = {name: _run_case(case, paths[case.model], batches[case.model]) for name, case in BY_SIZE[size].items()}
    distributed.shutdown()
    return results


def _run_case(case: Case, path: str, whole: SequenceBatch) -> dict[str, Any]:
    from megatron_rl.policy.policy import Policy

    cfg = make_config(path, case.parallel, case.dtype)
    with layout(cfg, case.alone) as dp_rank:
        policy = Policy.build(cfg)
        batch, plan = local_part(whole, cfg, dp_rank, case.max_tokens)
        frozen = {name: bias.clone() for name, bias in expert_biases(policy)}
        found = policy.log_probs(batch, plan, with_entropy=True)
        result = policy.train_step(batch, plan, SPEC)
        return {
            "sequences": plan.sequences(dp_rank),
            "microbatches": plan.num_microbatches,
            "log_probs": np.split(found.log_probs, batch.offsets[1:-1]),
            "entropy": np.split(found.entropy, batch.offsets[1:-1]),
            "metrics": result,
            "gradients": gradients(policy),
            "unmoved": [bool((frozen[name] == bias).all()) for name, bias in expert_biases(policy)],
        }


def expert_biases(policy: Any) -> list[tuple[str, Any]]:
    return [buffer for chunk in policy.chunks for buffer in chunk.named_buffers() if buffer[0].endswith(".expert_bias")]


@dataclass(frozen=True)
class Reference:
    """What transformers says."""

    batch: SequenceBatch
    log_probs: np.ndarray
    entropy: np.ndarray
    metrics: dict[str, float]
    gradients: dict[str, np.ndarray]


def transformers_reference(path: str) -> Reference:
    """Log-probs first; then old and reference log-probs near them but away from the clip bounds; then the update."""
    import torch
    from transformers import AutoModelForCausalLM

    from megatron_rl.algorithms.losses import policy_loss
    from megatron_rl.algorithms.normalisation import BatchCounts
    from megatron_rl.algorithms.token_statistics import finalise_metrics, token_statistics

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    batch = make_batch(VOCAB, lengths=LENGTHS)
    log_probs, entropy = [], []
    for i, (start, end) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:], strict=True)):
        ids = torch.from_numpy(batch.tokens[start:end])
        scores = (model(ids[None]).logits[0, :-1] / float(batch.temperature[i])).log_softmax(-1)
        log_probs += [torch.zeros(1), scores.gather(1, ids[1:, None]).squeeze(1)]
        entropy += [torch.zeros(1), -(scores.exp() * scores).sum(-1)]
    logp, ent = torch.cat(log_probs), torch.cat(entropy)
    rng = np.random.default_rng(5)
    plain = logp.detach().numpy()

    def near(values: np.ndarray, steps: list[float]) -> np.ndarray:
        return (values + rng.choice(steps, size=values.shape)).astype(np.float32)

    batch = batch.with_arrays(
        old_log_probs=near(plain, [-1.5, -0.4, -0.1, 0.05, 0.1, 0.4]),
        reference_log_probs=near(plain, [-0.3, 0.2, 0.6]),
        behaviour_log_probs=near(plain, [-0.02, 0.01, 0.03]),
    )
    arrays = {
        name: torch.from_numpy(getattr(batch, name))
        for name in ("old_log_probs", "advantages", "weights", "reference_log_probs")
    }
    loss, flags = policy_loss(logp, SPEC, entropy=ent, **arrays)
    loss.backward()
    mask = torch.from_numpy(batch.mask)
    sums = token_statistics(
        logp.detach(),
        mask,
        old_log_probs=arrays["old_log_probs"],
        flags=flags,
        entropy=ent.detach(),
        reference_log_probs=arrays["reference_log_probs"],
        behaviour_log_probs=torch.from_numpy(batch.behaviour_log_probs),
    )
    metrics = finalise_metrics({**sums, "loss": loss.detach()}, BatchCounts.of(batch.trainable_counts))
    masked = [np.where(batch.mask, values, 0) for values in (plain, ent.detach().numpy())]
    return Reference(batch, *masked, metrics, saved_gradients(model, Path(path) / "gradients"))


MODELS: dict[str, dict[str, Any]] = {
    **DENSE_MODELS,
    **{family: {"family": family} for family in MOE_SETTINGS},
    "some_dense": {"family": "qwen3_moe", "mlp_only_layers": [1], "norm_topk_prob": False},
    "direct_queries": {
        "family": "deepseek_v3",
        "q_lora_rank": None,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.3},
    },
    "plain_glm": {
        "family": "glm4_moe",
        "attention_bias": False,
        "use_qk_norm": False,
        "n_group": 1,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.25},
    },
}
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: str(tiny_model(folder / name, vocab_size=VOCAB, layers=4, **settings))
        for name, settings in MODELS.items()
    }


@pytest.fixture(scope="module")
def references(paths: dict[str, str]) -> dict[str, Reference]:
    return {name: transformers_reference(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def results(paths: dict[str, str], references: dict[str, Reference]) -> Results:
    """Case -> what each rank found."""
    batches = {name: reference.batch for name, reference in references.items()}
    found = {}
    for size, cases in BY_SIZE.items():
        by_rank = run_ranks(size, run_cases, size, paths, batches, timeout=240)
        found |= {name: [rank[name] for rank in by_rank] for name in cases}
    return found


def whole_gradients(ranks: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Of all pipeline stages."""
    return {name: values for rank in ranks for name, values in rank["gradients"].items()}


def in_order(ranks: list[dict[str, Any]], key: str, count: int) -> list[np.ndarray]:
    """Per-token results of every sequence of the whole batch."""
    found = {i: values for rank in ranks for i, values in zip(rank["sequences"], rank[key], strict=True)}
    return [found[i] for i in range(count)]


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    difference, scale = np.abs(found - expected).max(), np.abs(expected).max()
    return float(difference / scale) if scale else float(difference)  # an expert without tokens has no gradient


@pytest.mark.parametrize("name", EXACT)
def test_log_probs_and_entropy_are_those_of_transformers(name, results, references):
    reference = references[CASES[name].model]
    for key, expected in (("log_probs", reference.log_probs), ("entropy", reference.entropy)):
        found = np.concatenate(in_order(results[name], key, len(reference.batch)))
        assert np.abs(found - expected).max() <= TOLERANCE, key


@pytest.mark.parametrize("name", EXACT)
def test_gradients_are_those_of_transformers(name, results, references):
    expected, found = references[CASES[name].model].gradients, whole_gradients(results[name])
    assert found.keys() == expected.keys()
    errors = {key: relative_error(found[key], expected[key]) for key in expected}
    assert worst(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("name", EXACT)
def test_metrics_are_those_of_the_whole_batch_on_every_rank(name, results, references):
    expected = references[CASES[name].model].metrics
    for rank in results[name]:
        for key, value in expected.items():
            assert rank["metrics"][key] == pytest.approx(value, abs=TOLERANCE * max(1, abs(value))), key
        assert not rank["metrics"]["optimizer/skipped"]


@pytest.mark.parametrize("name", EXACT)
def test_gradient_norm_is_that_of_the_whole_model(name, results, references):
    norms = [np.linalg.norm(values.astype(np.float64)) for values in references[CASES[name].model].gradients.values()]
    for rank in results[name]:
        assert rank["metrics"]["optimizer/grad_norm"] == pytest.approx(np.linalg.norm(norms), rel=TOLERANCE)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.model in ("deepseek_v3", "glm4_moe")])
def test_biases_for_choosing_stay_as_they_were_loaded(name, results):
    assert all(all(rank["unmoved"]) for rank in results[name])
    stages = CASES[name].parallel.get("pipeline_model_parallel_size", 1)
    assert sum(len(rank["unmoved"]) for rank in results[name]) == 3 * len(results[name]) / stages


def test_every_loss_term_and_clip_takes_part(references):
    """The comparison above would prove little if nothing were clipped or the KL were 0."""
    metrics = references["qwen3"].metrics
    for name in ("clip_fraction_high", "clip_fraction_low", "clip_fraction_dual", "kl_reference", "entropy"):
        assert metrics[f"policy/{name}"] > 0.01, name
    assert abs(metrics["policy/loss"]) > 0.1


def test_small_caps_make_several_microbatches(results):
    assert results["one_rank_qwen3"][0]["microbatches"] == 1
    assert results["dp2_microbatches"][0]["microbatches"] >= 3
    assert results["tp2_microbatches"][0]["microbatches"] >= 5
    assert results["pp2_interleaved"][0]["microbatches"] % 2 == 0


def test_bf16_stays_near_fp32(results, references):
    metrics, reference = results["tp2_bf16"][0]["metrics"], references["qwen3"]
    assert metrics["policy/entropy"] == pytest.approx(reference.metrics["policy/entropy"], rel=0.02)
    assert metrics["optimizer/grad_norm"] == pytest.approx(results["tp2"][0]["metrics"]["optimizer/grad_norm"], rel=0.1)
    found = np.concatenate(in_order(results["tp2_bf16"], "log_probs", len(reference.batch)))
    assert np.abs(found - reference.log_probs).mean() < 0.05
