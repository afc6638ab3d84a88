"""From a step's table to its updates: whose statistics count, what each token weighs, that every sample comes once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.advantages import compute_advantages
from megatron_rl.algorithms.spec import AdvantageSpec
from megatron_rl.config import Config
from megatron_rl.policy.batch import SequenceBatch
from megatron_rl.policy.step_batch import Update, plan_step

GROUPS, SIZE, LONGEST = 8, 4, 8


def config(data_parallel_size: int = 1, dynamic_sampling: str = "off", **algorithm: Any) -> Config:
    return Config(
        run_dir="unused",
        seed=3,
        model={"path": "unused"},
        data={"prompts": "unused.jsonl"},
        reward={"components": [{"name": "exact"}]},
        parallel={"data_parallel_size": data_parallel_size},
        algorithm={"max_tokens_per_microbatch": 24, **algorithm},
        rollout={
            "groups_per_step": GROUPS,
            "group_size": SIZE,
            "max_response_tokens": LONGEST,
            "dynamic_sampling": dynamic_sampling,
        },
    )


def table(seed: int = 0) -> dict[str, np.ndarray]:
    """Rewards that vary in every group; a tenth of the samples is truncated and masked, one reward is missing."""
    rng = np.random.default_rng(seed)
    count = GROUPS * SIZE
    lengths = rng.integers(1, LONGEST + 1, count)
    reward = rng.normal(size=count)
    reward[5] = np.nan
    return {
        "reward": reward,
        "group_index": np.repeat(np.arange(GROUPS), SIZE),
        "prompt_length": rng.integers(1, 9, count),
        "response_length": lengths,
        "trainable_tokens": np.where(rng.random(count) < 0.1, 0, lengths),
        "valid": np.isfinite(reward),
        "informative": np.repeat(np.arange(GROUPS) % 3 > 0, SIZE),
    }


def trained(updates: list[Update]) -> list[int]:
    return [row for update in updates for row in update.samples.tolist()]


def by_row(updates: list[Update]) -> dict[int, float]:
    return {row: a for u in updates for row, a in zip(u.samples.tolist(), u.advantages.tolist(), strict=True)}


@pytest.mark.parametrize("updates", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_sample_with_a_trainable_token_is_trained_on_once(updates: int, ranks: int) -> None:
    samples = table()
    plans = plan_step(samples, config(ranks, updates_per_batch=updates), step=2)
    expected = np.flatnonzero(samples["valid"] & (samples["trainable_tokens"] > 0)).tolist()
    assert len(plans) == updates
    assert sorted(trained(plans)) == expected
    for update in plans:
        shares = [update.local(rank).tolist() for rank in range(ranks)]
        assert sorted(i for share in shares for i in share) == list(range(len(update.samples)))
        groups = set(samples["group_index"][update.samples].tolist())
        others = {g for other in plans if other is not update for g in samples["group_index"][other.samples].tolist()}
        assert not groups & others


def test_every_rank_computes_the_same_plan_and_every_step_another_order() -> None:
    cfg = config(updates_per_batch=4)
    first, again, later = (trained(plan_step(table(), cfg, step)) for step in (0, 0, 1))
    assert first == again
    assert first != later


@pytest.mark.parametrize("updates", [1, 4])
@pytest.mark.parametrize("kind", ["grpo", "reinforce_pp"])
def test_advantages_are_those_of_the_whole_batch_however_it_is_dealt(kind: str, updates: int) -> None:
    samples = table()
    found = by_row(plan_step(samples, config(advantage=kind, updates_per_batch=updates), step=0))
    tokens = np.where(samples["valid"], samples["trainable_tokens"], 0)
    expected = compute_advantages(
        samples["reward"], samples["group_index"], tokens, samples["valid"], AdvantageSpec(kind)
    )
    assert found == {row: pytest.approx(expected[row], rel=1e-6) for row in found}


def test_a_masked_sample_stays_in_the_statistics_of_its_group() -> None:
    samples, cfg = table(), config(advantage="dr_grpo")
    masked = int(np.flatnonzero(samples["trainable_tokens"] == 0)[0])
    before = by_row(plan_step(samples, cfg, step=0))
    samples["reward"][masked] += 10
    after = by_row(plan_step(samples, cfg, step=0))
    moved = {row: after[row] - before[row] for row in before if after[row] != before[row]}
    assert {row // SIZE for row in moved} == {masked // SIZE}
    assert masked not in moved
    assert list(moved.values()) == [pytest.approx(-10 / SIZE, rel=1e-5)] * len(moved)


def test_mask_leaves_groups_of_equal_correctness_out_of_the_loss_and_its_denominators() -> None:
    samples = table()
    (update,) = plan_step(samples, config(dynamic_sampling="mask"), step=0)
    assert samples["informative"][update.samples].all()
    assert (update.weights * samples["trainable_tokens"][update.samples]).sum() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("updates", [1, 4])
@pytest.mark.parametrize("normalisation", ["token_mean", "seq_mean_token_mean", "constant"])
def test_weights_are_normalised_over_one_update(normalisation: str, updates: int) -> None:
    samples = table()
    for update in plan_step(samples, config(normalisation=normalisation, updates_per_batch=updates), step=0):
        tokens = samples["trainable_tokens"][update.samples]
        total = (update.weights * tokens).sum()
        expected = tokens.sum() / (len(tokens) * LONGEST) if normalisation == "constant" else 1.0
        assert total == pytest.approx(expected, rel=1e-6)


def test_a_batch_without_a_trainable_token_still_has_a_micro_batch_on_every_rank() -> None:
    samples = table()
    samples["trainable_tokens"][:] = 0
    (update,) = plan_step(samples, config(2), step=0)
    assert len(update.samples) == 0
    assert update.plan.num_microbatches >= 1
    assert update.plan.data_parallel_size == 2


def test_tokens_get_the_advantage_and_weight_of_their_sample_and_masked_ones_weigh_nothing() -> None:
    samples = table()
    (update,) = plan_step(samples, config(2), step=0)
    for rank in range(2):
        rows = update.samples[update.local(rank)]
        lengths = (samples["prompt_length"] + samples["response_length"])[rows]
        masks = [np.arange(n) >= p for n, p in zip(lengths, samples["prompt_length"][rows], strict=True)]
        ids = [f"s{row}" for row in rows]
        batch = update.fill(SequenceBatch.from_sequences([[1] * n for n in lengths], masks, ids), rank)
        assert batch.advantages is not None
        assert batch.weights is not None
        for i, row in enumerate(rows.tolist()):
            tokens = slice(batch.offsets[i], batch.offsets[i + 1])
            position = update.samples.tolist().index(row)
            assert set(batch.advantages[tokens].tolist()) == {float(update.advantages[position])}
            assert (batch.weights[tokens] == np.where(masks[i], update.weights[position], 0)).all()
