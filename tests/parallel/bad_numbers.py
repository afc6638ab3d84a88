"""What becomes of updates with numbers that are not finite: scenarios within a rank, for test_policy_updates.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_rl.algorithms.spec import LossSpec
from tests.parallel.policy_setup import local_part, make_batch

VOCAB = 300
SPEC = LossSpec()


def build(cfg: Any) -> Any:
    from megatron_rl.policy.policy import Policy

    return Policy.build(cfg)


def weights_of(policy: Any) -> list[Any]:
    return [parameter.detach().clone() for chunk in policy.chunks for parameter in chunk.parameters()]


def equal(first: list[Any], second: list[Any]) -> bool:
    return all(bool((a == b).all()) for a, b in zip(first, second, strict=True))


def prepared(cfg: Any, dp_rank: int, policy: Any) -> tuple[Any, Any, Any]:
    """The whole batch, this rank's part with the policy's own old log-probs, and the plan."""
    whole = make_batch(VOCAB)
    batch, plan = local_part(whole, cfg, dp_rank)
    log_probs = policy.log_probs(batch, plan).log_probs
    batch = batch.with_arrays(old_log_probs=log_probs + np.float32(0.1), reference_log_probs=log_probs)
    return whole, batch, plan


def non_finite(cfg: Any, dp_rank: int) -> Any:
    """One bad value of one sample, which lives on one data-parallel rank only; then a good update."""
    policy = build(cfg)
    before = weights_of(policy)
    whole, batch, plan = prepared(cfg, dp_rank, policy)
    found: dict[str, Any] = {}
    position = int(np.flatnonzero(whole.mask)[0])
    sample = whole.sample_ids[int(np.searchsorted(whole.offsets, position, side="right")) - 1]
    for name, value in (("old_log_probs", np.nan), ("old_log_probs", -np.inf), ("advantages", np.inf)):
        bad = batch
        if sample in batch.sample_ids:
            array = getattr(batch, name).copy()
            array[
                batch.offsets[batch.sample_ids.index(sample)] + position - whole.offsets[whole.sample_ids.index(sample)]
            ] = value
            bad = batch.with_arrays(**{name: array})
        result = policy.train_step(bad, plan, SPEC)
        found[f"{name}={value}"] = (
            result["optimizer/skipped"],
            equal(before, weights_of(policy)),
        )
        policy._skipped_in_a_row = 0
    after = policy.train_step(batch, plan, SPEC)
    found["recovers"] = (
        not after["optimizer/skipped"],
        np.isfinite(after["optimizer/grad_norm"]),
        not equal(before, weights_of(policy)),
    )
    return found


def non_finite_of_every_loss(cfg: Any, dp_rank: int) -> Any:
    """One bad advantage of one sample; the second skip in a row names it on every rank."""
    from megatron_rl.policy.policy import PolicyError

    policy = build(cfg)
    before = weights_of(policy)
    whole, batch, plan = prepared(cfg, dp_rank, policy)
    sample = whole.sample_ids[int(np.flatnonzero(whole.trainable_counts)[0])]
    bad = batch
    if sample in batch.sample_ids:
        first = batch.offsets[batch.sample_ids.index(sample)]
        advantages = batch.advantages.copy()
        advantages[first + np.flatnonzero(batch.mask[first:])[0]] = np.nan
        bad = batch.with_arrays(advantages=advantages)
    found: dict[str, Any] = {"expected": f"samples: {sample}. This was number 2 in a row"}
    for kind in ("gspo", "gspo_token", "cispo", "sapo", "gmpo", "opmd"):
        policy._skipped_in_a_row = 1
        try:
            policy.train_step(bad, plan, LossSpec(kind=kind, kl_coef=0.1))
        except PolicyError as error:
            found[kind] = (str(error), equal(before, weights_of(policy)))
    return found


def gradient_overflow(cfg: Any, dp_rank: int) -> Any:
    """Everything that the loss reads is finite, but its gradient is not."""
    policy = build(cfg)
    before = weights_of(policy)
    _, batch, plan = prepared(cfg, dp_rank, policy)
    huge = batch.with_arrays(weights=batch.weights * np.float32(1e36), advantages=batch.advantages * np.float32(1e10))
    result = policy.train_step(huge, plan, SPEC)
    return result["optimizer/skipped"], equal(before, weights_of(policy))


def too_many_skipped(cfg: Any, dp_rank: int) -> Any:
    from megatron_rl.policy.policy import PolicyError

    policy = build(cfg)
    _, batch, plan = prepared(cfg, dp_rank, policy)
    bad = batch.with_arrays(advantages=np.full_like(batch.advantages, np.nan))
    policy.train_step(bad, plan, SPEC)
    try:
        policy.train_step(bad, plan, SPEC)
    except PolicyError as error:
        return str(error)
    return "no error"
