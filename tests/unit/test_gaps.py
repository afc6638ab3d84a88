"""How far trainer and engine are apart: the metrics, held to plain float64 sums, and the value of every sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.normalisation import BatchCounts
from megatron_rl.algorithms.token_statistics import finalise_metrics, token_statistics
from megatron_rl.data import PromptRecord
from megatron_rl.policy.batch import SequenceBatch
from megatron_rl.policy.sequence_gaps import batch_gaps, sequence_gaps
from megatron_rl.policy.step_batch import LocalUpdate, plan_step
from megatron_rl.rollout.dump import rollout_file, write_dump
from megatron_rl.rollout.sample import Group, Span
from tests.unit.test_step_batch import config, table

differences = st.floats(-3, 3, width=32).map(lambda x: 0.0 if abs(x) < 1e-6 else x)


@given(st.lists(st.tuples(st.floats(-8, 0, width=32), differences, st.booleans()), min_size=1, max_size=40))
@settings(deadline=None)
def test_gap_metrics_equal_plain_sums_and_read_nothing_that_is_masked(tokens: list[tuple[float, float, bool]]) -> None:
    behaviour = np.array([b for b, _, _ in tokens], np.float32)
    old = (behaviour + np.array([d for _, d, _ in tokens], np.float32)).astype(np.float32)
    mask = np.array([m for _, _, m in tokens])
    old[~mask], behaviour[~mask] = np.nan, np.inf
    sums = token_statistics(
        torch.from_numpy(old), torch.from_numpy(mask), behaviour_log_probs=torch.from_numpy(behaviour)
    )
    found = finalise_metrics(sums, BatchCounts(int(mask.sum()), 1))
    if not mask.any():
        assert found == {}
        return
    log_rho = old[mask].astype(np.float64) - behaviour[mask].astype(np.float64)
    rho = np.exp(log_rho)
    expected = {
        "gap/mean_abs": np.abs(log_rho).mean(),
        "gap/max_abs": np.abs(log_rho).max(),
        "gap/kl_k3": (rho - 1 - log_rho).mean(),
        "gap/outside_fraction": ((rho < 0.8) | (rho > 1.25)).mean(),
        "gap/rho_mean": rho.mean(),
        "gap/rho_max": rho.max(),
        "gap/ess": rho.sum() ** 2 / (len(rho) * (rho**2).sum()),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert found["gap/ess"] <= 1 + 1e-12


def filled(lengths: np.ndarray, rng: np.random.Generator) -> SequenceBatch:
    """Sequences with a masked first token, and NaN wherever nothing may be read."""
    masks = [np.arange(n) > 0 for n in lengths]
    batch = SequenceBatch.from_sequences([[1] * n for n in lengths], masks, [f"s{i}" for i in range(len(lengths))])
    arrays = {name: rng.normal(size=batch.num_tokens).astype(np.float32) for name in ("old", "behaviour")}
    for array in arrays.values():
        array[~batch.mask] = np.nan
    return batch.with_arrays(**{f"{name}_log_probs": array for name, array in arrays.items()})


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 7), max_size=6))
@settings(deadline=None)
def test_the_gap_of_a_sequence_is_over_its_trainable_tokens(seed: int, lengths: list[int]) -> None:
    batch = filled(np.array(lengths, np.int64), np.random.default_rng(seed))
    found = batch_gaps(batch)
    for i, (start, end) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:], strict=True)):
        live = slice(start + 1, end)
        gap = np.abs(batch.old_log_probs[live].astype(np.float64) - batch.behaviour_log_probs[live])
        assert found[:, i] == pytest.approx([gap.mean(), gap.max()] if len(gap) else [0, 0], rel=1e-12)


def test_every_rank_learns_the_gap_of_every_sample_that_was_trained_on() -> None:
    samples = table()
    cfg = config(2, updates_per_batch=2)
    updates = plan_step(samples, cfg, step=0)
    rng, shares = np.random.default_rng(1), []
    expected: dict[int, list[float]] = {}
    for rank in range(2):
        share = []
        for update in updates:
            rows = update.samples[update.local(rank)]
            batch = filled(samples["response_length"][rows] + 1, rng)
            mismatch = rng.random(len(batch)).astype(np.float32)
            told_of_each = np.stack([*batch_gaps(batch), mismatch], axis=1)
            expected |= dict(zip(rows.tolist(), told_of_each.tolist(), strict=True))
            batch = batch.with_arrays(routing_mismatch=mismatch)
            share.append(LocalUpdate(update, rank, batch))
        shares.append(share)
    rows = len(samples["reward"])
    kept: list[np.ndarray] = []
    sequence_gaps(shares[1], rows, lambda values: kept.append(values.copy()) or values)
    found = sequence_gaps(shares[0], rows, lambda values: values + kept[0])
    assert [*found] == ["gap_mean_abs", "gap_max_abs", "routing_mismatch"]
    assert len(expected) < rows
    for row in range(rows):
        told = [values[row] for values in found.values()]
        assert told == pytest.approx(expected[row]) if row in expected else told == [None] * 3


def test_a_sample_without_a_trainable_token_has_no_gap() -> None:
    (update,) = plan_step(table(), config(1), step=0)
    rows = update.samples[update.local(0)]
    batch = filled(table()["response_length"][rows] + 1, np.random.default_rng(2))
    batch.mask[batch.offsets[0] : batch.offsets[1]] = False
    found = sequence_gaps([LocalUpdate(update, 0, batch)], len(table()["reward"]), lambda values: values)
    for name in ("gap_mean_abs", "gap_max_abs"):
        assert found[name][rows[0]] is None
        assert found[name][rows[1]] > 0
    assert set(found["routing_mismatch"]) == {None}


def test_the_dump_holds_the_gaps_of_the_trained_samples_and_ignores_what_was_not_sampled(tmp_path: Path) -> None:
    groups = []
    for group_id in (4, 6):
        group = Group.start(group_id, f"p{group_id}", np.arange(2), 2, run_seed=0, version=0, temperature=1.0)
        for sample in group.samples:
            sample.append([1, 2], [-1.0, -3.0], [Span(0, 0, 2)])
            sample.append_observation([5, 5])
            sample.append([3], [-5.0], [Span(0, 0, 1)])
            sample.finish("stop")
            sample.exclude()
        groups.append(group)
    records = [PromptRecord(g.prompt_id, ({"role": "user", "content": "?"},)) for g in groups]

    class Plain:
        def decode(self, token_ids: list[int]) -> str:
            return str(token_ids)

    path = rollout_file(tmp_path, 1)
    path.parent.mkdir()
    gaps = {"gap_mean_abs": [0.25, None], "gap_max_abs": [0.5, None], "routing_mismatch": [0.1, None]}
    write_dump(path, 1, groups, records, Plain(), {6}, gaps)
    rows = pq.read_table(path).to_pylist()
    assert [row["gap_mean_abs"] for row in rows] == [None, None, 0.25, None]
    assert [row["gap_max_abs"] for row in rows] == [None, None, 0.5, None]
    assert [row["routing_mismatch"] for row in rows] == [None, None, 0.1, None]
    assert {row["turns"] for row in rows} == {2}
    assert {row["log_prob_mean"] for row in rows} == {-3.0}
