"""Loss, every gradient and every metric of every layout are those of one rank, whatever else is switched on.

`layout_cases.cover` says what is combined with what. The references are computed in the same launch, before the ranks
join: each rank is a world of its own for its share of them. What one rank computes is compared with transformers in
test_policy_parity.py. `pytest tests/parallel/test_layouts.py -s -k table` prints the largest error of each layout.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.normalisation import token_weights
from megatron_rl.policy.batch import SequenceBatch
from megatron_rl.policy.microbatch import Plan
from tests.parallel.launch import run_ranks
from tests.parallel.layout_cases import FACTORS, LAYOUTS, Case, Loss, cover, deal, pairs
from tests.parallel.policy_setup import gradients, layout, make_batch, make_config
from tests.tiny import tiny_model

pytestmark = pytest.mark.parallel

VOCAB = 300  # not a multiple of 128: the embedding is padded
COUNT = 10
MASKED = [2, 7]
LONGEST = 24.0
TOLERANCE = 1e-5
Paths = dict[bool, str]


@dataclass(frozen=True)
class Found:
    """What one rank says of one case."""

    metrics: dict[str, float]
    gradients: dict[str, np.ndarray]
    """Of its own pipeline stage."""
    log_probs: dict[int, np.ndarray]
    """By sequence, of its data-parallel rank."""
    sum_of_terms: float
    """Σ |weighted loss of a token|; of references only."""


# ------------------------------------------------------------------------------------------------------- on the ranks


def run_cases(paths: Paths, cases: list[Case]) -> tuple[dict[Loss, Found], dict[Case, Found]]:
    """References of this rank's share, then all cases in company."""
    from megatron_rl.policy import distributed

    batches, references = _references(paths, cases)
    found = {}
    for _, group in itertools.groupby(cases, key=lambda case: case.layout):
        found |= _run_layout(paths, list(group), batches)
    distributed.shutdown()
    return references, found


def _references(paths: Paths, cases: list[Case]) -> tuple[dict[bool, SequenceBatch], dict[Loss, Found]]:
    from megatron_rl.policy.policy import Policy

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    losses = sorted({case.loss for case in cases}, key=repr)[rank::world]
    everything = Plan(((tuple(range(COUNT)),),))
    batches, found = {}, {}
    with layout(make_config(paths[True]), alone=True):
        for tied, path in paths.items():
            policy = Policy.build(make_config(path))
            batch = make_batch(VOCAB, count=COUNT, masked=MASKED)
            batches[tied] = _with_policies(batch, policy.log_probs(batch, everything).log_probs)
            for loss in (loss for loss in losses if loss.tied is tied):
                found[loss] = _update(policy, loss, batches[tied], everything, 0)
    return batches, found


def _with_policies(batch: SequenceBatch, log_probs: np.ndarray) -> SequenceBatch:
    """Old, reference and behaviour log-probs near the policy's own but away from every clip bound."""
    rng = np.random.default_rng(5)

    def near(steps: list[float]) -> np.ndarray:
        return (log_probs + rng.choice(steps, size=log_probs.shape)).astype(np.float32)

    return batch.with_arrays(
        old_log_probs=near([-1.5, -0.4, -0.1, 0.05, 0.1, 0.4]),
        reference_log_probs=near([-0.3, 0.2, 0.6]),
        behaviour_log_probs=near([-0.2, 0.1, 0.3]),
    )


def _run_layout(paths: Paths, cases: list[Case], batches: dict[bool, SequenceBatch]) -> dict[Case, Found]:
    from megatron_rl.policy.policy import Policy

    policies: dict[Any, Policy] = {}
    found = {}
    with layout(make_config(paths[True], cases[0].parallel)) as dp_rank:
        for case in cases:
            cfg = make_config(paths[case.tied], case.parallel)
            key = (case.tied, case.recompute, case.use_distributed_optimizer)
            if key not in policies:
                policies[key] = Policy.build(cfg)
            batch, parallel = batches[case.tied], cfg.parallel
            plan = deal(case, list(batch.lengths), MASKED, parallel.data_parallel_size, parallel.microbatch_multiple)
            found[case] = _update(policies[key], case.loss, batch, plan, dp_rank)
    return found


def _update(policy: Any, loss: Loss, batch: SequenceBatch, plan: Any, dp_rank: int) -> Found:
    """One update at learning rate 0, so that the next case finds the same weights."""
    per_sequence = token_weights(loss.normalisation, batch.trainable_counts, constant=LONGEST)
    weights = np.where(batch.mask, np.repeat(per_sequence, batch.lengths), 0).astype(np.float32)
    batch = batch.with_arrays(weights=weights)
    if not loss.given_old:
        batch = batch.with_arrays(old_log_probs=None)
    sequences = plan.sequences(dp_rank)
    local = batch.select(sequences)
    log_probs = policy.log_probs(local, plan).log_probs
    policy.set_learning_rate(0.0)
    result = policy.train_step(local, plan, loss.spec)
    assert not result.skipped
    metrics = {name: value for name, value in result.metrics.items() if name != "policy/microbatches"}
    by_sequence = dict(zip(sequences, np.split(log_probs, local.offsets[1:-1]), strict=False))
    terms = _sum_of_terms(loss, local, log_probs) if len(sequences) == COUNT else 0.0
    return Found(metrics, gradients(policy), by_sequence, terms)


def _sum_of_terms(loss: Loss, batch: SequenceBatch, log_probs: np.ndarray) -> float:
    """Without the entropy's terms: a smaller number, so a stricter test."""
    import dataclasses

    import torch

    from megatron_rl.algorithms.losses import policy_loss

    names = ("old_log_probs", "advantages", "weights", "reference_log_probs")
    spec = dataclasses.replace(loss.spec, entropy_coef=0.0)
    total = 0.0
    for t in np.flatnonzero(batch.mask):
        arrays = {n: None if (a := getattr(batch, n)) is None else torch.from_numpy(a[t : t + 1]) for n in names}
        total += abs(float(policy_loss(torch.from_numpy(log_probs[t : t + 1]), spec, **arrays)[0]))
    return total


# ------------------------------------------------------------------------------------------------------------- checks


@dataclass(frozen=True)
class Results:
    """Of one launch or several."""

    references: dict[Loss, Found]
    ranks: dict[Case, list[Found]]

    def errors(self, case: Case) -> dict[str, float]:
        """Largest error of each kind, over ranks and tensors, each relative to what rule 1 of the algorithms names."""
        expected, ranks = self.references[case.loss], self.ranks[case]
        assert {name for rank in ranks for name in rank.gradients} == expected.gradients.keys()
        assert {i for rank in ranks for i in rank.log_probs} == expected.log_probs.keys()
        assert all(rank.metrics.keys() == expected.metrics.keys() for rank in ranks)
        scales = {"policy/loss": expected.sum_of_terms}
        return {
            "loss": max(_error(rank.metrics, expected.metrics, ["policy/loss"], scales) for rank in ranks),
            "gradients": max(_error(rank.gradients, expected.gradients, rank.gradients) for rank in ranks),
            "metrics": max(_error(r.metrics, expected.metrics, r.metrics.keys() - {"policy/loss"}) for r in ranks),
            "log-probs": max(_error(rank.log_probs, expected.log_probs, rank.log_probs) for rank in ranks),
        }


def _error(found: Any, expected: Any, names: Any, scales: dict[str, float] | None = None) -> float:
    """max |found - expected| / max |expected| (or the given scale) of the worst of `names`; 0 for exact zeros."""
    errors = [0.0]
    for name in names:
        difference = np.abs(np.subtract(found[name], expected[name], dtype=np.float64)).max()
        scale = (scales or {}).get(name) or np.abs(expected[name]).max()
        errors.append(float(difference / scale) if difference else 0.0)
    return max(errors)


def measure(folder: Any, seed: int = 0, sizes: tuple[int, ...] = tuple(LAYOUTS)) -> Results:
    """One launch for each number of processes."""
    paths = {t: str(tiny_model(folder / f"tied-{t}", tied=t, vocab_size=VOCAB, layers=4)) for t in (False, True)}
    references: dict[Loss, Found] = {}
    ranks: dict[Case, list[Found]] = {}
    for size in sizes:
        cases = cover(LAYOUTS[size], seed)
        by_rank = run_ranks(size, run_cases, paths, cases, timeout=400)
        for own, _ in by_rank:
            references |= own
        ranks |= {case: [found[case] for _, found in by_rank] for case in cases}
    return Results(references, ranks)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return measure(tmp_path_factory.mktemp("models"))


ALL_CASES = [case for layouts in LAYOUTS.values() for case in cover(layouts)]


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_loss_gradients_and_metrics_are_those_of_one_rank(case: Case, results: Results) -> None:
    errors = results.errors(case)
    assert max(errors.values()) <= TOLERANCE, errors


def test_every_pair_of_settings_occurs_in_a_case() -> None:
    for layouts in LAYOUTS.values():
        factors = {"layout": tuple(layouts), **FACTORS}
        seen = {pair for case in cover(layouts) for pair in pairs(vars(case))}
        for (a, first), (b, second) in itertools.combinations(factors.items(), 2):
            assert {((a, x), (b, y)) for x in first for y in second} <= seen


def test_references_differ_from_each_other(results: Results) -> None:
    """Were a setting without effect, its comparison would show nothing."""
    losses = [found.metrics["policy/loss"] for found in results.references.values()]
    assert len({round(loss, 6) for loss in losses}) > 0.8 * len(losses)
    assert all(found.sum_of_terms > 0.1 for found in results.references.values())


def table(results: Results) -> str:
    """Largest relative error of each layout, over its cases."""
    kinds = ("loss", "gradients", "metrics", "log-probs")
    lines = [f"{'layout':14} {'cases':>5} " + " ".join(f"{kind:>10}" for kind in kinds)]
    for name in (name for layouts in LAYOUTS.values() for name in layouts):
        errors = [results.errors(case) for case in results.ranks if case.layout == name]
        worst = " ".join(f"{max(error[kind] for error in errors):10.1e}" for kind in kinds)
        lines.append(f"{name:14} {len(errors):5} {worst}")
    return "\n".join(lines)


def test_table_of_errors(results: Results) -> None:
    """With -s this shows the table; the numbers are asserted above."""
    print("\n" + table(results))
    assert len(table(results).splitlines()) == 1 + sum(map(len, LAYOUTS.values()))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_other_combinations_are_those_of_one_rank(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = measure(tmp_path_factory.mktemp("models"), seed)
    errors = {str(case): found.errors(case) for case in found.ranks}
    assert {name: error for name, error in errors.items() if not max(error.values()) <= TOLERANCE} == {}
