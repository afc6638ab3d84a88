"""Loss, gradients, metrics and log-probs do not depend on how the work is split, and are those of transformers.

The reference is computed in the test's own process: transformers' model, one sequence after another, and autograd.
Every layout must agree with it and with the unsplit run. Each scaling that `policy/forward.py` switches off would show
here: sums over data-parallel ranks and micro-batches would become means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.policy.batch import SequenceBatch
from tests.parallel.launch import run_ranks
from tests.parallel.policy_setup import CP2, DP2, PP2, TP2, gradients, layout, local_part, make_batch, make_config
from tests.tiny import tiny_model
from tests.worst import worst

pytestmark = pytest.mark.parallel

VOCAB = 300  # not a multiple of 128: the embedding is padded
SPEC = LossSpec(dual_clip=3.0, kl_coef=0.1, entropy_coef=0.01)
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """One way to split the same update. `max_tokens` of 24 makes several micro-batches per rank."""

    parallel: dict[str, Any]
    tied: bool = False
    max_tokens: int = 256
    alone: bool = False
    dtype: str = "float32"


CASES = {
    "one_rank": Case({}, alone=True),
    "one_rank_tied": Case({}, tied=True, alone=True),
    "one_rank_microbatches": Case({}, max_tokens=24, alone=True),
    "tp2": Case(TP2),
    "tp2_microbatches": Case(TP2, max_tokens=24),
    "tp2_sequence_parallel": Case(TP2 | {"sequence_parallel": True}, max_tokens=48),
    "tp2_sequence_parallel_tied": Case(TP2 | {"sequence_parallel": True}, tied=True),
    "tp2_recompute_full": Case(TP2 | {"recompute": "full"}),
    "tp2_recompute_selective": Case(TP2 | {"recompute": "selective", "sequence_parallel": True}),
    "tp2_tied": Case(TP2, tied=True),
    "pp2": Case(PP2),
    "pp2_microbatches": Case(PP2, max_tokens=24),
    "pp2_tied": Case(PP2, tied=True, max_tokens=48),
    "pp2_interleaved": Case(PP2 | {"virtual_pipeline_model_parallel_size": 2}, max_tokens=24),
    "cp2": Case(CP2),
    "cp2_microbatches": Case(CP2, max_tokens=24),
    "cp2_tied": Case(CP2, tied=True),
    "cp2_recompute_full": Case(CP2 | {"recompute": "full"}, max_tokens=48),
    "cp2_recompute_selective": Case(CP2 | {"recompute": "selective"}),
    "dp2": Case(DP2),
    "dp2_microbatches": Case(DP2, max_tokens=24),
    "dp2_whole_optimizer": Case(DP2 | {"use_distributed_optimizer": False}),
    "tp2_bf16": Case(TP2, dtype="bfloat16"),
}
SPLIT = [name for name, case in CASES.items() if not case.alone and case.dtype == "float32"]
EXACT = [name for name, case in CASES.items() if case.dtype == "float32"]


def run_cases(paths: dict[bool, str], batches: dict[bool, SequenceBatch]) -> dict[str, Any]:
    """In a rank: every case in turn."""
    from megatron_rl.policy import distributed

    results = {name: _run_case(case, paths[case.tied], batches[case.tied]) for name, case in CASES.items()}
    distributed.shutdown()
    return results


def _run_case(case: Case, path: str, whole: SequenceBatch) -> dict[str, Any]:
    from megatron_rl.policy.policy import Policy

    cfg = make_config(path, case.parallel, case.dtype)
    with layout(cfg, case.alone) as dp_rank:
        policy = Policy.build(cfg)
        batch, plan = local_part(whole, cfg, dp_rank, case.max_tokens)
        found = policy.log_probs(batch, plan, with_entropy=True)
        result = policy.train_step(batch, plan, SPEC)
        return {
            "sequences": plan.sequences(dp_rank),
            "microbatches": plan.num_microbatches,
            "log_probs": np.split(found.log_probs, batch.offsets[1:-1]),
            "entropy": np.split(found.entropy, batch.offsets[1:-1]),
            "metrics": result.metrics,
            "grad_norm": result.grad_norm,
            "skipped": result.skipped,
            "gradients": gradients(policy),
        }


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
    batch = make_batch(VOCAB)
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
    found = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return Reference(batch, np.where(batch.mask, plain, 0), np.where(batch.mask, ent.detach(), 0), metrics, found)


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> dict[bool, Reference]:
    folder = tmp_path_factory.mktemp("models")
    return {
        tied: transformers_reference(str(tiny_model(folder / f"tied-{tied}", tied=tied, vocab_size=VOCAB, layers=4)))
        for tied in (False, True)
    }


@pytest.fixture(scope="module")
def results(references, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """Case -> what each rank found."""
    folder = tmp_path_factory.getbasetemp()
    paths = {tied: str(next(folder.glob(f"models*/tied-{tied}"))) for tied in (False, True)}
    by_rank = run_ranks(2, run_cases, paths, {tied: r.batch for tied, r in references.items()}, timeout=240)
    return {name: [rank[name] for rank in by_rank] for name in CASES}


def whole_gradients(ranks: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Of all pipeline stages."""
    return {name: values for rank in ranks for name, values in rank["gradients"].items()}


def in_order(ranks: list[dict[str, Any]], key: str, count: int) -> list[np.ndarray]:
    """Per-token results of every sequence of the whole batch."""
    found = {i: values for rank in ranks for i, values in zip(rank["sequences"], rank[key], strict=True)}
    return [found[i] for i in range(count)]


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", EXACT)
def test_log_probs_and_entropy_are_those_of_transformers(name, results, references):
    reference = references[CASES[name].tied]
    for key, expected in (("log_probs", reference.log_probs), ("entropy", reference.entropy)):
        found = np.concatenate(in_order(results[name], key, len(reference.batch)))
        assert np.abs(found - expected).max() <= TOLERANCE, key


@pytest.mark.parametrize("name", EXACT)
def test_gradients_are_those_of_transformers(name, results, references):
    expected, found = references[CASES[name].tied].gradients, whole_gradients(results[name])
    assert found.keys() == expected.keys()
    errors = {key: relative_error(found[key], expected[key]) for key in expected}
    assert worst(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("name", SPLIT)
def test_split_gradients_equal_those_of_one_rank(name, results):
    expected = whole_gradients(results["one_rank_tied" if CASES[name].tied else "one_rank"])
    errors = {key: relative_error(values, expected[key]) for key, values in whole_gradients(results[name]).items()}
    assert worst(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("name", EXACT)
def test_metrics_are_those_of_the_whole_batch_on_every_rank(name, results, references):
    expected = references[CASES[name].tied].metrics
    for rank in results[name]:
        for key, value in expected.items():
            assert rank["metrics"][key] == pytest.approx(value, abs=TOLERANCE * max(1, abs(value))), key
        assert not rank["skipped"]


@pytest.mark.parametrize("name", EXACT)
def test_gradient_norm_is_that_of_the_whole_model(name, results, references):
    norms = [np.linalg.norm(values.astype(np.float64)) for values in references[CASES[name].tied].gradients.values()]
    for rank in results[name]:
        assert rank["grad_norm"] == pytest.approx(np.linalg.norm(norms), rel=TOLERANCE)


def test_every_loss_term_and_clip_takes_part(references):
    """The comparison above would prove little if nothing were clipped or the KL were 0."""
    metrics = references[False].metrics
    for name in ("clip_fraction_high", "clip_fraction_low", "clip_fraction_dual", "kl_reference", "entropy"):
        assert metrics[f"policy/{name}"] > 0.01, name
    assert abs(metrics["policy/loss"]) > 0.1


def test_small_caps_make_several_microbatches(results):
    assert results["one_rank"][0]["microbatches"] == 1
    assert results["dp2_microbatches"][0]["microbatches"] >= 3
    assert results["tp2_microbatches"][0]["microbatches"] >= 5
    assert results["pp2_interleaved"][0]["microbatches"] % 2 == 0


def test_bf16_stays_near_fp32(results, references):
    metrics, reference = results["tp2_bf16"][0]["metrics"], references[False]
    assert metrics["policy/entropy"] == pytest.approx(reference.metrics["policy/entropy"], rel=0.02)
    assert results["tp2_bf16"][0]["grad_norm"] == pytest.approx(results["tp2"][0]["grad_norm"], rel=0.1)
    found = np.concatenate(in_order(results["tp2_bf16"], "log_probs", len(reference.batch)))
    assert np.abs(found - reference.log_probs).mean() < 0.05
