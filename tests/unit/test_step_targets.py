"""Advantages and weights of a step: whose statistics count, what a token weighs, that no split over ranks matters."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.advantages import compute_advantages
from megatron_rl.algorithms.spec import AdvantageSpec, LossSpec
from megatron_rl.config import Config
from megatron_rl.config.moe import MoeConfig
from megatron_rl.policy.batch import SequenceBatch
from megatron_rl.policy.step_batch import LocalUpdate, Update, plan_step
from megatron_rl.policy.step_targets import accepted_tokens, fill_targets

from .test_step_batch import LONGEST, SIZE, config, table

Table = dict[str, Any]


class Replicas:
    """A sum over ranks that are threads of this process."""

    def __init__(self, count: int) -> None:
        self._parts: dict[int, np.ndarray] = {}
        self._arrived, self._read = (threading.Barrier(count, timeout=30) for _ in range(2))

    def sum_of(self, rank: int) -> Callable[[np.ndarray], np.ndarray]:
        def total(values: np.ndarray) -> np.ndarray:
            self._parts[rank] = values
            self._arrived.wait()
            summed = np.sum(list(self._parts.values()), axis=0)
            self._read.wait()
            return summed

        return total


def sampled(seed: int = 0) -> Table:
    return {**table(seed), "sources": [f"source-{i % 3}" for i in range(len(table()["reward"]))]}


def local(update: Update, samples: Table, rank: int) -> LocalUpdate:
    """This rank's share; log-probs of a token depend on its sample and position alone."""
    rows = update.samples[update.local(rank)]
    masks = [[0] * int(samples["prompt_length"][r]) + [1] * int(samples["response_length"][r]) for r in rows]
    batch = SequenceBatch.from_sequences([[1] * len(m) for m in masks], masks, [f"s{row}" for row in rows])
    old, noise = (
        np.concatenate(
            [np.random.default_rng([row, seed]).normal(-1, 0.5, len(m)) for row, m in zip(rows, masks, strict=True)]
        )
        for seed in (1, 2)
    )
    log_probs = {"old": old, "behaviour": old - noise, "reference": old + 2 * noise}
    arrays = {f"{name}_log_probs": values.astype(np.float32) for name, values in log_probs.items()}
    return LocalUpdate(update, rank, batch.with_arrays(**arrays))


def targets(samples: Table, cfg: Config, means: dict[str, float] | None = None) -> tuple[dict, dict, dict]:
    """Advantage and weights of every row that is trained on, from all ranks together, and the running means."""
    ranks = cfg.parallel.data_parallel_size
    plans, replicas = plan_step(samples, cfg, step=0), Replicas(ranks)

    def one_rank(rank: int) -> Any:
        mine = [local(update, samples, rank) for update in plans]
        return fill_targets(samples, mine, cfg, replicas.sum_of(rank), means or {})

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(one_rank, range(ranks)))
    advantages, weights = {}, {}
    for filled, _ in results:
        for update in filled:
            batch = update.batch
            for i, row in enumerate(update.update.samples[update.update.local(update.dp_rank)].tolist()):
                tokens = slice(batch.offsets[i], batch.offsets[i + 1])
                (advantages[row],) = set(batch.advantages[tokens].tolist())
                assert (batch.weights[tokens][~batch.mask[tokens]] == 0).all()
                (weights[row],) = set(batch.weights[tokens][batch.mask[tokens]].tolist())
    return advantages, weights, results[0][1]


@pytest.mark.parametrize("updates", [1, 4])
@pytest.mark.parametrize("kind", ["grpo", "reinforce_pp"])
def test_advantages_are_those_of_the_whole_batch_however_it_is_dealt(kind: str, updates: int) -> None:
    samples = sampled()
    found, _, _ = targets(samples, config(2, advantage=kind, updates_per_batch=updates))
    tokens = np.where(samples["valid"], samples["trainable_tokens"], 0)
    expected = compute_advantages(
        samples["reward"], samples["group_index"], tokens, samples["valid"], AdvantageSpec(kind)
    )
    assert found == {row: pytest.approx(expected[row], rel=1e-6) for row in found}


def test_a_masked_sample_stays_in_the_statistics_of_its_group() -> None:
    samples, cfg = sampled(), config(advantage="dr_grpo")
    masked = int(np.flatnonzero(samples["trainable_tokens"] == 0)[0])
    before, _, _ = targets(samples, cfg)
    samples["reward"][masked] += 10
    after, _, _ = targets(samples, cfg)
    moved = {row: after[row] - before[row] for row in before if after[row] != before[row]}
    assert {row // SIZE for row in moved} == {masked // SIZE}
    assert masked not in moved
    assert list(moved.values()) == [pytest.approx(-10 / SIZE, rel=1e-5)] * len(moved)


@pytest.mark.parametrize("updates", [1, 4])
@pytest.mark.parametrize("normalisation", ["token_mean", "seq_mean_token_mean", "constant"])
def test_weights_are_normalised_over_one_update(normalisation: str, updates: int) -> None:
    samples, cfg = sampled(), config(2, normalisation=normalisation, updates_per_batch=updates)
    _, weights, _ = targets(samples, cfg)
    for update in plan_step(samples, cfg, step=0):
        total = sum(weights[row] * samples["trainable_tokens"][row] for row in update.samples.tolist())
        constant = update.tokens.sum() / (len(update.tokens) * LONGEST)
        assert total == pytest.approx(constant if normalisation == "constant" else 1.0, rel=1e-6)


KL = {"kl_place": "reward", "kl_coef": 0.1}


def test_the_kl_in_the_reward_is_subtracted_before_groups_are_compared() -> None:
    samples, cfg = sampled(), config(advantage="dr_grpo", updates_per_batch=2, **KL)
    found, _, _ = targets(samples, cfg)
    reward = samples["reward"].copy()
    for update in plan_step(samples, cfg, step=0):
        batch = local(update, samples, 0).batch
        gap = np.where(batch.mask, batch.old_log_probs - batch.reference_log_probs, 0)
        reward[update.samples] -= 0.1 * np.add.reduceat(gap, batch.offsets[:-1])
    for group in range(len(reward) // SIZE):
        rows = [row for row in range(group * SIZE, (group + 1) * SIZE) if samples["valid"][row]]
        for row in rows:
            if row in found:
                assert found[row] == pytest.approx(reward[row] - reward[rows].mean(), abs=1e-5)


@pytest.mark.parametrize("options", [KL, {"corrections": ["mis"], "renormalise_after_rejection": True}])
@pytest.mark.parametrize("normalisation", ["token_mean", "seq_mean_token_mean"])
def test_targets_that_depend_on_log_probs_do_not_depend_on_the_ranks(options: dict, normalisation: str) -> None:
    one, four = (targets(sampled(), config(n, normalisation=normalisation, **options)) for n in (1, 4))
    assert one[0] == four[0]
    assert one[1] == four[1]


def test_renormalised_weights_add_up_to_one_over_what_is_accepted() -> None:
    samples, cfg = sampled(), config(2, corrections=["mis"], renormalise_after_rejection=True)
    plain = targets(samples, config(2, corrections=["mis"]))[1]
    weights = targets(samples, cfg)[1]
    (update,) = plan_step(samples, cfg, step=0)
    kept = {}
    for rank in range(2):
        mine = local(update, samples, rank)
        counts = accepted_tokens(mine.batch, LossSpec.from_config(cfg.algorithm))
        kept |= dict(zip(update.samples[update.local(rank)].tolist(), counts.tolist(), strict=True))
    assert 0 < sum(kept.values()) < update.tokens.sum()
    assert sum(weights[row] * n for row, n in kept.items()) == pytest.approx(1, rel=1e-6)
    assert all(weights[row] > plain[row] for row in plain if kept[row])


@pytest.mark.parametrize(("corrections", "renormalise"), [([], False), ([], True), (["mis"], False), (["mis"], True)])
def test_sequences_routed_differently_weigh_nothing_and_keep_their_mask(
    corrections: list[str], renormalise: bool
) -> None:
    options: Any = {
        "corrections": corrections,
        "renormalise_after_rejection": renormalise,
        "normalisation": "token_mean",
    }
    samples, cfg = sampled(), config(**options)
    (update,) = plan_step(samples, cfg, step=0)
    mine = local(update, samples, 0)
    mismatch = np.linspace(0, 0.6, len(mine.batch), dtype=np.float32)
    mismatch[1] = np.nan  # nothing was known of this one
    mine = mine.with_arrays(routing_mismatch=mismatch)
    plain, limited = (
        fill_targets(samples, [mine], c, lambda values: values, {})[0][0].batch
        for c in (cfg, cfg.model_copy(update={"moe": MoeConfig(max_routing_mismatch=0.3)}))
    )
    rejected = np.repeat(np.nan_to_num(mismatch) > 0.3, mine.batch.lengths)
    assert 0 < rejected.mean() < 1
    assert (limited.weights[rejected] == 0).all()
    assert (limited.mask == plain.mask).all()
    kept = plain.mask & ~rejected
    if renormalise:
        counts = accepted_tokens(mine.batch, LossSpec.from_config(cfg.algorithm))
        counts[np.nan_to_num(mismatch) > 0.3] = 0
        kept &= np.repeat(counts > 0, mine.batch.lengths)
        assert limited.weights[kept] == pytest.approx(1 / counts.sum(), rel=1e-6)
    else:
        assert (limited.weights[kept] == plain.weights[kept]).all()


def test_what_a_correction_accepts_is_counted_per_sequence() -> None:
    batch = SequenceBatch.from_sequences([[1] * 4, [1] * 3, [1] * 3], [[0, 1, 1, 1], [0, 1, 1], [0, 1, 1]], list("abc"))
    log_rho = np.array([np.nan, 0, 1, -1, 9, 0.4, 0.4, 0, 0.1, -0.1], dtype=np.float32)
    batch = batch.with_arrays(old_log_probs=log_rho, behaviour_log_probs=np.zeros(10, dtype=np.float32))
    spec = LossSpec(correction="mis", correction_bounds=(0.9, 3.0), sequence_bounds=(0.8, 1.2))
    # a: exp(-1) is below 0.9; b: its mean ratio exp(0.4) is above 1.2; c: all of it
    assert accepted_tokens(batch, spec).tolist() == [2, 0, 2]


def test_running_means_of_sources_share_the_baseline_and_take_in_each_step() -> None:
    samples, cfg = sampled(), config(ema_baseline=0.5, std="none")
    found, _, means = targets(samples, cfg, {"source-0": 10.0})
    plain = targets(samples, config(std="none"))[0]
    for row, advantage in found.items():
        if row % 3 == 0:
            group = np.arange(len(samples["reward"])) // SIZE == row // SIZE
            mean = samples["reward"][group & samples["valid"]].mean()
            assert advantage == pytest.approx(samples["reward"][row] - 0.5 * mean - 5.0, rel=1e-5)
        else:
            assert advantage == plain[row]
    of_source = np.arange(len(samples["reward"])) % 3
    seen = [samples["reward"][(of_source == i) & samples["valid"]].mean() for i in range(3)]
    assert means == {
        "source-0": pytest.approx(0.9 * 10 + 0.1 * seen[0]),
        "source-1": pytest.approx(seen[1]),
        "source-2": pytest.approx(seen[2]),
    }
