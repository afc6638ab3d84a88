"""Loss, every gradient and every metric of every layout are those of one rank, whatever else is switched on.

`layout_cases.cover` says what is combined with what. The references are computed in the same launch, before the ranks
join: each rank is a world of its own for its share of them. Loss and metrics of one rank are in turn compared with the
plain formulas here, its log-probs with transformers in test_policy_parity.py.

`pytest tests/parallel/test_layouts.py -s -k table` prints the largest error of each layout, `-s -k thorough` that of
each algorithm in each layout.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.normalisation import token_weights
from megatron_rl.policy.batch import TOKEN_FIELDS, SequenceBatch
from megatron_rl.policy.microbatch import Plan
from megatron_rl.policy.step_targets import accepted_tokens
from tests import reference_loss
from tests.loss_recipes import spec_of
from tests.parallel.launch import run_ranks
from tests.parallel.layout_cases import FACTORS, LAYOUTS, Case, Loss, cover, deal, pairs, wanted_pairs
from tests.parallel.policy_setup import gradients, layout, make_batch, make_config
from tests.tiny import tiny_model
from tests.worst import worst

pytestmark = pytest.mark.parallel

VOCAB = 300  # not a multiple of 128: the embedding is padded
COUNT = 10
MASKED = [2, 7]
LONGEST = 24.0
TOLERANCE = 1e-5
OF_THE_SPLIT = ("policy/microbatches",)
OF_THE_STEP = ("policy/tokens", "policy/sequences", "optimizer/grad_norm", "optimizer/lr", "optimizer/skipped")
"""Metrics that are no formula's."""
Paths = dict[bool, str]


@dataclass(frozen=True)
class Found:
    """What one rank says of one case."""

    metrics: dict[str, float]
    gradients: dict[str, np.ndarray]
    """Of its own pipeline stage."""
    log_probs: dict[int, np.ndarray]
    """By sequence, of its data-parallel rank."""


@dataclass(frozen=True)
class Inputs:
    """What a model is trained on, and what it says of it before."""

    batch: SequenceBatch
    log_probs: np.ndarray
    entropy: np.ndarray


# ------------------------------------------------------------------------------------------------------- on the ranks


def run_cases(paths: Paths, cases: list[Case]) -> tuple[dict[bool, Inputs], dict[Loss, Found], dict[Case, Found]]:
    """References of this rank's share, then all cases in company."""
    from megatron_rl.policy import distributed

    inputs, references = _references(paths, cases)
    found = {}
    for _, group in itertools.groupby(cases, key=lambda case: case.layout):
        found |= _run_layout(paths, list(group), inputs)
    distributed.shutdown()
    return inputs, references, found


def _references(paths: Paths, cases: list[Case]) -> tuple[dict[bool, Inputs], dict[Loss, Found]]:
    from megatron_rl.policy.policy import Policy

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    losses = sorted({case.loss for case in cases}, key=repr)[rank::world]
    everything = Plan(((tuple(range(COUNT)),),))
    inputs, found = {}, {}
    with layout(make_config(paths[True]), alone=True):
        for tied, path in paths.items():
            policy = Policy.build(make_config(path))
            batch = make_batch(VOCAB, count=COUNT, masked=MASKED)
            seen = policy.log_probs(batch, everything, with_entropy=True)
            assert seen.entropy is not None
            inputs[tied] = Inputs(_with_policies(batch, seen.log_probs), seen.log_probs, seen.entropy)
            for loss in (loss for loss in losses if loss.tied is tied):
                found[loss] = _update(policy, loss, inputs[tied].batch, everything, 0)
    return inputs, found


def _with_policies(batch: SequenceBatch, log_probs: np.ndarray) -> SequenceBatch:
    """Old, reference and behaviour log-probs near the policy's own but away from every clip bound; NaN where masked."""
    rng = np.random.default_rng(5)

    def near(steps: list[float]) -> np.ndarray:
        values = log_probs + rng.choice(steps, size=log_probs.shape)
        return np.where(batch.mask, values, np.nan).astype(np.float32)

    return batch.with_arrays(
        advantages=np.where(batch.mask, batch.advantages, np.float32(np.nan)),
        old_log_probs=near([-1.5, -0.4, -0.1, 0.05, 0.1, 0.4]),
        reference_log_probs=near([-0.3, 0.2, 0.6]),
        behaviour_log_probs=near([-0.2, 0.1, 0.3]),
    )


def _run_layout(paths: Paths, cases: list[Case], inputs: dict[bool, Inputs]) -> dict[Case, Found]:
    from megatron_rl.policy.policy import Policy

    policies: dict[Any, Policy] = {}
    found = {}
    with layout(make_config(paths[True], cases[0].parallel)) as dp_rank:
        for case in cases:
            cfg = make_config(paths[case.tied], case.parallel, loss={"chunk_tokens": case.chunk})
            key = (case.tied, case.recompute, case.use_distributed_optimizer, case.chunk)
            if key not in policies:
                policies[key] = Policy.build(cfg)
            batch, parallel = inputs[case.tied].batch, cfg.parallel
            plan = deal(case, list(batch.lengths), MASKED, parallel.data_parallel_size, parallel.microbatch_multiple)
            found[case] = _update(policies[key], case.loss, batch, plan, dp_rank)
    return found


def _update(policy: Any, loss: Loss, batch: SequenceBatch, plan: Any, dp_rank: int) -> Found:
    """One update at learning rate 0, so that the next case finds the same weights."""
    spec = spec_of(loss.recipe(LONGEST))
    counts = accepted_tokens(batch, spec) if loss.renormalise else batch.trainable_counts
    per_sequence = token_weights(loss.normalisation, counts, constant=LONGEST)
    weights = np.where(batch.mask, np.repeat(per_sequence, batch.lengths), 0).astype(np.float32)
    batch = batch.with_arrays(weights=weights)
    if not loss.given_old:
        batch = batch.with_arrays(old_log_probs=None)
    sequences = plan.sequences(dp_rank)
    local = batch.select(sequences)
    log_probs = policy.log_probs(local, plan).log_probs
    policy.set_learning_rate(0.0)
    result = policy.train_step(local, plan, spec)
    assert not result["optimizer/skipped"]
    by_sequence = dict(zip(sequences, np.split(log_probs, local.offsets[1:-1]), strict=False))
    return Found({n: v for n, v in result.items() if n not in OF_THE_SPLIT}, gradients(policy), by_sequence)


# ------------------------------------------------------------------------------------------------------------- checks


@dataclass(frozen=True)
class Results:
    """Of one launch or several."""

    inputs: dict[bool, Inputs]
    references: dict[Loss, Found]
    ranks: dict[Case, list[Found]]
    formulas: dict[Loss, reference_loss.Result] = field(default_factory=dict)
    """Those that were computed already."""

    def errors(self, case: Case) -> dict[str, float]:
        """Largest error of each kind, over ranks and tensors, each relative to what rule 1 of the algorithms names."""
        expected, ranks = self.references[case.loss], self.ranks[case]
        assert {name for rank in ranks for name in rank.gradients} == expected.gradients.keys()
        assert {i for rank in ranks for i in rank.log_probs} == expected.log_probs.keys()
        assert all(rank.metrics.keys() == expected.metrics.keys() for rank in ranks)
        scales = {"policy/loss": self.formula(case.loss).sum_of_terms}
        return {
            "loss": worst(_error(rank.metrics, expected.metrics, ["policy/loss"], scales) for rank in ranks),
            "gradients": worst(_error(rank.gradients, expected.gradients, rank.gradients) for rank in ranks),
            "metrics": worst(_error(r.metrics, expected.metrics, r.metrics.keys() - {"policy/loss"}) for r in ranks),
            "log-probs": worst(_error(rank.log_probs, expected.log_probs, rank.log_probs) for rank in ranks),
        }

    def formula(self, loss: Loss) -> reference_loss.Result:
        """Loss and metrics of the formulas, from the log-probs and entropies of one rank."""
        if loss not in self.formulas:
            self.formulas[loss] = self._formula(loss)
        return self.formulas[loss]

    def _formula(self, loss: Loss) -> reference_loss.Result:
        inputs = self.inputs[loss.tied]
        batch = inputs.batch
        arrays = {n: torch.from_numpy(a).double() for n in TOKEN_FIELDS if (a := getattr(batch, n)) is not None}
        arrays |= {
            "log_probs": torch.from_numpy(inputs.log_probs).double(),
            "entropy": torch.from_numpy(inputs.entropy),
        }
        responses = [
            reference_loss.Response(
                arrays["log_probs"][a:b],
                arrays["entropy"][a:b],
                torch.from_numpy(batch.mask[a:b]),
                arrays["advantages"][a:b],
                arrays["old_log_probs"][a:b] if loss.given_old else None,
                arrays["behaviour_log_probs"][a:b],
                arrays["reference_log_probs"][a:b],
            )
            for a, b in itertools.pairwise(batch.offsets)
        ]
        return reference_loss.evaluate(responses, loss.recipe(LONGEST))


def _error(found: Any, expected: Any, names: Any, scales: dict[str, float] | None = None) -> float:
    """max |found - expected| / max |expected| (or the given scale) of the worst of `names`; 0 for exact zeros."""
    errors = [0.0]
    for name in names:
        difference = np.abs(np.subtract(found[name], expected[name], dtype=np.float64)).max()
        scale = (scales or {}).get(name) or np.abs(expected[name]).max()
        errors.append(float(difference / scale) if difference != 0 else 0.0)
    return worst(errors)


def measure(folder: Any, seed: int = 0, sizes: tuple[int, ...] = tuple(LAYOUTS), thorough: bool = False) -> Results:
    """One launch for each number of processes."""
    paths = {t: str(tiny_model(folder / f"tied-{t}", tied=t, vocab_size=VOCAB, layers=4)) for t in (False, True)}
    inputs: dict[bool, Inputs] = {}
    references: dict[Loss, Found] = {}
    ranks: dict[Case, list[Found]] = {}
    for size in sizes:
        cases = cover(LAYOUTS[size], seed, thorough=thorough)
        by_rank = run_ranks(size, run_cases, paths, cases, timeout=1500 if thorough else 400)
        inputs = by_rank[0][0]
        for _, own, _ in by_rank:
            references |= own
        ranks |= {case: [found[case] for _, _, found in by_rank] for case in cases}
    return Results(inputs, references, ranks)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return measure(tmp_path_factory.mktemp("models"))


ALL_CASES = [case for layouts in LAYOUTS.values() for case in cover(layouts)]


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_loss_gradients_and_metrics_are_those_of_one_rank(case: Case, results: Results) -> None:
    errors = results.errors(case)
    assert worst(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("thorough", [False, True])
def test_every_pair_of_settings_occurs_in_a_case(thorough: bool) -> None:
    for layouts in LAYOUTS.values():
        seen = {pair for case in cover(layouts, thorough=thorough) for pair in pairs(vars(case))}
        assert wanted_pairs({"layout": tuple(layouts), **FACTORS}, thorough) <= seen


def test_loss_and_metrics_of_one_rank_are_those_of_the_formulas(results: Results) -> None:
    for loss, found in results.references.items():
        expected = results.formula(loss)
        metrics = {name: value for name, value in found.metrics.items() if name not in (*OF_THE_STEP, "policy/loss")}
        assert metrics == pytest.approx(expected.metrics, rel=TOLERANCE, abs=1e-6), loss
        error = abs(found.metrics["policy/loss"] - float(expected.loss))
        assert error <= TOLERANCE * expected.sum_of_terms, loss


def test_references_differ_from_each_other(results: Results) -> None:
    """Were a setting without effect, its comparison would show nothing."""
    losses = [found.metrics["policy/loss"] for found in results.references.values()]
    assert len({round(loss, 6) for loss in losses}) > 0.8 * len(losses)


def table(results: Results) -> str:
    """Largest relative error of each layout, over its cases."""
    kinds = ("loss", "gradients", "metrics", "log-probs")
    lines = [f"{'layout':14} {'cases':>5} " + " ".join(f"{kind:>10}" for kind in kinds)]
    for name in (name for layouts in LAYOUTS.values() for name in layouts):
        errors = [results.errors(case) for case in results.ranks if case.layout == name]
        row = " ".join(f"{worst(error[kind] for error in errors):10.1e}" for kind in kinds)
        lines.append(f"{name:14} {len(errors):5} {row}")
    return "\n".join(lines)


def test_table_of_errors(results: Results) -> None:
    """With -s this shows the table; the numbers are asserted above."""
    print("\n" + table(results))
    assert len(table(results).splitlines()) == 1 + sum(map(len, LAYOUTS.values()))


def algorithms_by_layout(results: Results) -> str:
    """Largest relative error of anything, of each algorithm in each layout."""
    names = [name for layouts in LAYOUTS.values() for name in layouts]
    found: dict[tuple[str, str], float] = {}
    for case in results.ranks:
        key = case.algorithm, case.layout
        found[key] = worst([found.get(key, 0.0), *results.errors(case).values()])
    lines = [f"{'':11}" + "".join(f"{name.replace(' ', ''):>12}" for name in names)]
    for algorithm in FACTORS["algorithm"]:
        lines.append(f"{algorithm:11}" + "".join(f"{found[algorithm, name]:12.1e}" for name in names))
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2])
def test_thorough_combinations_are_those_of_one_rank(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = measure(tmp_path_factory.mktemp("models"), seed, thorough=True)
    print("\n" + algorithms_by_layout(found))
    errors = {str(case): found.errors(case) for case in found.ranks}
    assert {name: error for name, error in errors.items() if not worst(error.values()) <= TOLERANCE} == {}
