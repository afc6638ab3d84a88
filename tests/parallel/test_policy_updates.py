"""What an update may and may not do to the weights, and the phases around it: warm-up, reference, sharing a batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from megatron_rl.algorithms.spec import LossSpec
from tests.parallel import bad_numbers
from tests.parallel.bad_numbers import SPEC, VOCAB, build, equal, prepared, weights_of
from tests.parallel.launch import run_ranks
from tests.parallel.policy_setup import CP2, DP2, PP2, TP2, gradients, layout, local_part, make_batch, make_config
from tests.tiny import tiny_model

pytestmark = pytest.mark.parallel

LAYOUTS = {
    "tp2": TP2 | {"sequence_parallel": True},
    "pp2": PP2,
    "ep2": DP2 | {"expert_model_parallel_size": 2},
    "cp2": CP2,
}
SCENARIOS = (
    "masked_garbage",
    "all_masked",
    "non_finite",
    "non_finite_of_every_loss",
    "gradient_overflow",
    "too_many_skipped",
    "learning_rate",
    "reset",
    "reference",
    "one_sample",
    "warm_up",
    "clipping",
    "weight_decay",
    "sharing",
    "failure_on_rank_zero",
)


def run_scenarios(path: str) -> dict[str, dict[str, Any]]:
    """In a rank: every scenario in every layout."""
    from megatron_rl.policy import distributed

    found: dict[str, dict[str, Any]] = {}
    for name, parallel in LAYOUTS.items():
        cfg = make_config(path, parallel, algorithm={"kl_coef": 0.1}, optimizer={"max_skipped_steps": 2})
        with layout(cfg) as dp_rank:
            found[name] = {scenario: _scenario(scenario)(cfg, dp_rank) for scenario in SCENARIOS}
    distributed.shutdown()
    return found


def _scenario(name: str) -> Any:
    return getattr(bad_numbers, name, None) or globals()[f"_{name}"]


# ------------------------------------------------------------------------------------------ scenarios, within a rank


def _masked_garbage(cfg: Any, dp_rank: int) -> Any:
    """Gradients with NaN, infinities and huge values at every masked position, and without."""
    found = []
    for garbage in (0.0, np.nan, np.inf, 1e30):
        policy = build(cfg)
        _, batch, plan = prepared(cfg, dp_rank, policy)
        names = ("advantages", "weights", "old_log_probs", "reference_log_probs")
        batch = batch.with_arrays(
            **{n: np.where(batch.mask, getattr(batch, n), np.float32(garbage)) for n in names},
            behaviour_log_probs=np.where(batch.mask, batch.old_log_probs, np.float32(garbage)),
        )
        result = policy.train_step(batch, plan, LossSpec(kl_coef=0.1, entropy_coef=0.01))
        found.append((result, gradients(policy)))
    return found


def _all_masked(cfg: Any, dp_rank: int) -> Any:
    policy = build(cfg)
    before = weights_of(policy)
    _, batch, plan = prepared(cfg, dp_rank, policy)
    batch = dataclasses.replace(batch, mask=np.zeros_like(batch.mask), weights=np.zeros_like(batch.weights))
    result = policy.train_step(batch, plan, SPEC)
    largest = max(float(np.abs(values).max()) for values in gradients(policy).values())
    return {"result": result, "gradient": largest, "unchanged": equal(before, weights_of(policy))}


def _learning_rate(cfg: Any, dp_rank: int) -> Any:
    policy = build(cfg)
    _, batch, plan = prepared(cfg, dp_rank, policy)
    before = weights_of(policy)
    policy.set_learning_rate(0.0)
    result = policy.train_step(batch, plan, SPEC)
    frozen = equal(before, weights_of(policy))
    policy.set_learning_rate(0.5)
    policy.train_step(batch, plan, SPEC)
    largest = max(float((a - b).abs().max()) for a, b in zip(before, weights_of(policy), strict=True))
    return result["optimizer/lr"], frozen, largest


def _reset(cfg: Any, dp_rank: int) -> Any:
    """After `reset_optimizer`, updates are those of a policy that starts from the same weights."""
    import torch

    used, fresh = build(cfg), build(cfg)
    _, batch, plan = prepared(cfg, dp_rank, used)
    for seed in range(3):
        other, other_plan = local_part(make_batch(VOCAB, seed=seed + 10), cfg, dp_rank)
        used.sft_step(other, other_plan, 1e-3)
    with torch.no_grad():
        for chunk, source in zip(fresh.chunks, used.chunks, strict=True):
            for parameter, values in zip(chunk.parameters(), source.parameters(), strict=True):
                parameter.copy_(values)
    used.reset_optimizer()
    for policy in (used, fresh):
        policy.set_learning_rate(1e-3)
        for _ in range(2):
            policy.train_step(batch, plan, SPEC)
    return equal(weights_of(used), weights_of(fresh))


def _reference(cfg: Any, dp_rank: int) -> Any:
    policy = build(cfg)
    _, batch, plan = prepared(cfg, dp_rank, policy)
    found: dict[str, Any] = {}
    at_start = policy.log_probs(batch, plan).log_probs
    policy.freeze_reference()
    policy.train_step(batch, plan, SPEC)
    before, trained = weights_of(policy), policy.log_probs(batch, plan).log_probs
    reference = policy.reference_log_probs(batch, plan)
    found["is_the_start"] = np.array_equal(reference, at_start)
    found["differs_from_the_trained"] = float(np.abs(reference - trained)[batch.mask].max(initial=0))
    found["comes_back"] = equal(before, weights_of(policy))
    found["log_probs_come_back"] = np.array_equal(trained, policy.log_probs(batch, plan).log_probs)
    policy.reference._host[0].fill_(0.5)  # a further pass would see this
    found["cached"] = np.array_equal(policy.reference_log_probs(batch, plan), reference)
    renamed = dataclasses.replace(batch, sample_ids=tuple(f"{name}!" for name in batch.sample_ids))
    found["not_cached"] = not np.array_equal(policy.reference_log_probs(renamed, plan), reference)
    found["next_update_is_finite"] = not policy.train_step(batch, plan, SPEC)["optimizer/skipped"]
    return found


def _one_sample(cfg: Any, dp_rank: int) -> Any:
    """A batch of one sample leaves the second replica with none: it takes part in every pass all the same."""
    policy = build(cfg)
    policy.freeze_reference()
    batch, plan = local_part(make_batch(VOCAB).select([0]), cfg, dp_rank)
    old = policy.log_probs(batch, plan).log_probs
    same = [np.array_equal(old, policy.reference_log_probs(batch, plan)) for _ in range(2)]  # computed, then cached
    batch = batch.with_arrays(old_log_probs=old, reference_log_probs=old)
    return len(batch), same, policy.train_step(batch, plan, LossSpec(kl_coef=0.1))["optimizer/grad_norm"]


def _warm_up(cfg: Any, dp_rank: int) -> Any:
    policy = build(cfg)
    batch, plan = local_part(make_batch(VOCAB), cfg, dp_rank)
    log_probs = policy.log_probs(batch, plan).log_probs.astype(np.float64)
    expected = float(-(log_probs * batch.weights).sum())
    results = [policy.sft_step(batch, plan, 5e-3) for _ in range(4)]
    return {"expected_here": expected, "metrics": results}


def _clipping(cfg: Any, dp_rank: int) -> Any:
    """The same first update with the gradient clipped: Adam's first step does not see it, the second one does."""
    norms = []
    for clip_grad in (0.0, 1e-3):
        clipped = cfg.model_copy(update={"optimizer": cfg.optimizer.model_copy(update={"clip_grad": clip_grad})})
        policy = build(clipped)
        _, batch, plan = prepared(cfg, dp_rank, policy)
        result = policy.train_step(batch, plan, SPEC)
        norms.append((result["optimizer/grad_norm"], policy.optimizer.gradient_norm()))
    return norms


def _weight_decay(cfg: Any, dp_rank: int) -> Any:
    """With a gradient of zero only the decay moves the weights: the factor of each, by its number of dimensions."""
    optimizer = cfg.optimizer.model_copy(update={"weight_decay": 0.5})
    policy = build(cfg.model_copy(update={"optimizer": optimizer}))
    before = weights_of(policy)
    _, batch, plan = prepared(cfg, dp_rank, policy)
    policy.set_learning_rate(0.1)
    policy.train_step(batch.with_arrays(weights=np.zeros_like(batch.weights)), plan, SPEC)
    pairs = list(zip(before, weights_of(policy), strict=True))
    return {d: [float(new.sum() / old.sum()) for old, new in pairs if (old.dim() > 1) is d] for d in (False, True)}


def _sharing(cfg: Any, dp_rank: int) -> Any:
    from megatron_rl.policy.distributed import is_data_parallel_leader
    from megatron_rl.policy.exchange import broadcast_to_replica, sum_over_data_parallel

    total = sum_over_data_parallel(np.array([[1.0, dp_rank], [2.0**53, -dp_rank]]))
    replicas = cfg.parallel.data_parallel_size
    added = total.tolist() == [[replicas, sum(range(replicas))], [replicas * 2.0**53, -sum(range(replicas))]]
    shard = f"shard {dp_rank}".encode() * 1000
    leader = is_data_parallel_leader()
    received = broadcast_to_replica(shard if leader else None)
    return received == shard, broadcast_to_replica(b"" if leader else None), added


def _failure_on_rank_zero(cfg: Any, dp_rank: int) -> Any:
    from megatron_rl.policy.checkpoint import CheckpointError
    from megatron_rl.policy.exchange import on_rank_zero

    def fail() -> None:
        raise OSError("disk full")

    try:
        on_rank_zero(fail, CheckpointError)
    except CheckpointError as error:
        return str(error)
    return "no error"


# ------------------------------------------------------------------------------------------------------------- checks


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, dict[str, Any]]]:
    """By rank: layout -> scenario -> what happened."""
    path = tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", vocab_size=VOCAB)
    return run_ranks(2, run_scenarios, str(path), timeout=240)


def of(found: list[dict[str, dict[str, Any]]], scenario: str) -> list[Any]:
    """One scenario on every rank of every layout."""
    return [rank[name][scenario] for rank in found for name in LAYOUTS]


def test_garbage_at_masked_positions_changes_nothing(found):
    for clean, *dirty in of(found, "masked_garbage"):
        for metrics, grads in dirty:
            assert metrics == clean[0]
            assert all(np.array_equal(grads[name], clean[1][name]) for name in clean[1])


def test_a_fully_masked_batch_has_loss_and_gradient_zero(found):
    for outcome in of(found, "all_masked"):
        assert outcome["result"]["policy/loss"] == 0
        assert outcome["result"]["optimizer/grad_norm"] == 0
        assert not outcome["result"]["optimizer/skipped"]
        assert outcome["gradient"] == 0
        assert outcome["unchanged"]


def test_a_non_finite_value_never_reaches_the_weights_of_any_rank(found):
    for outcome in of(found, "non_finite"):
        recovers = outcome["recovers"]
        assert all(recovers), recovers
        bad = {name: value for name, value in outcome.items() if name != "recovers"}
        assert len(bad) == 3
        assert all(value == (1.0, True) for value in bad.values()), bad


def test_a_bad_number_is_skipped_by_every_loss_and_its_sample_named(found):
    for outcome in of(found, "non_finite_of_every_loss"):
        expected = outcome.pop("expected")
        assert len(outcome) == 6
        for message, unchanged in outcome.values():
            assert expected in message
            assert unchanged


def test_an_overflowing_gradient_is_skipped(found):
    assert of(found, "gradient_overflow") == [(True, True)] * (2 * len(LAYOUTS))


def test_repeated_skips_end_the_run_naming_samples_and_keys(found):
    for message in of(found, "too_many_skipped"):
        assert "s0, s1, s3" in message
        assert "s2" not in message  # fully masked
        assert "optimizer.max_skipped_steps=2" in message


def test_the_learning_rate_can_be_changed_between_updates(found):
    for reported, frozen, largest in of(found, "learning_rate"):
        assert reported == 0
        assert frozen
        assert largest > 0.1


def test_a_reset_optimizer_steps_like_a_fresh_one(found):
    assert of(found, "reset") == [True] * (2 * len(LAYOUTS))


def test_the_reference_is_frozen_and_leaves_the_policy_bit_for_bit(found):
    for outcome in of(found, "reference"):
        assert outcome["is_the_start"]
        assert outcome["comes_back"]
        assert outcome["log_probs_come_back"]
        assert outcome["next_update_is_finite"]
    assert max(outcome["differs_from_the_trained"] for outcome in of(found, "reference")) > 0.01


def test_reference_log_probs_are_cached_by_sample(found):
    for outcome in of(found, "reference"):
        assert outcome["cached"]
        assert outcome["not_cached"]


def test_a_replica_without_samples_takes_part_in_every_pass(found):
    assert [rank["ep2"]["one_sample"][0] for rank in found] == [1, 0]
    assert all(same == [True, True] for _, same, _ in of(found, "one_sample"))
    norms = [norm for _, _, norm in of(found, "one_sample")]
    assert norms == pytest.approx([norms[0] or 1] * len(norms), rel=1e-4)


def test_warm_up_minimises_the_negative_log_likelihood_of_the_whole_batch(found):
    for name in LAYOUTS:
        ranks = [rank[name]["warm_up"] for rank in found]
        parts = [rank["expected_here"] for rank in ranks]
        expected = sum(parts) if name == "ep2" else parts[0]
        for rank in ranks:
            losses = [metrics["sft/loss"] for metrics in rank["metrics"]]
            assert losses[0] == pytest.approx(expected, rel=1e-5)
            assert losses[-1] < losses[0]
            assert rank["metrics"][0]["sft/lr"] == 5e-3
            assert rank["metrics"][0]["sft/tokens"] == make_batch(VOCAB).mask.sum()


def test_clipping_scales_the_gradient_but_not_the_reported_norm(found):
    for (norm, left), (clipped_norm, clipped_left) in of(found, "clipping"):
        assert clipped_norm == pytest.approx(norm, rel=1e-6)
        assert left == pytest.approx(norm, rel=1e-6)
        assert clipped_left == pytest.approx(1e-3, rel=1e-2)


def test_weights_decay_but_norms_do_not(found):
    for factors in of(found, "weight_decay"):
        assert factors[False] == pytest.approx([1.0] * len(factors[False]))
        assert factors[True] == pytest.approx([0.95] * len(factors[True]), rel=1e-4)
        assert factors[False]
        assert factors[True]


def test_a_leaders_bytes_reach_its_replica_and_a_sum_all_replicas(found):
    assert of(found, "sharing") == [(True, b"", True)] * (2 * len(LAYOUTS))


def test_rank_zeros_failure_is_raised_on_every_rank(found):
    assert of(found, "failure_on_rank_zero") == ["OSError: disk full"] * (2 * len(LAYOUTS))
