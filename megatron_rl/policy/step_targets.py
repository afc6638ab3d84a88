"""What every token of a step aims at: its advantage and its weight in the loss, once all log-probs are known.

Advantages come from the rewards of the whole step, weights from token counts of a whole update. Both may depend on
log-probs (`algorithm.kl_place: reward`, `algorithm.renormalise_after_rejection`), of which each data-parallel rank
knows its own share; then one sum over replicas of a number per sample tells everyone. Nothing is pulled or trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from megatron_rl.algorithms.advantages import compute_advantages, updated_means
from megatron_rl.algorithms.corrections import correct
from megatron_rl.algorithms.kl import kl_in_reward
from megatron_rl.algorithms.normalisation import token_weights
from megatron_rl.algorithms.spec import AdvantageSpec, LossSpec
from megatron_rl.config.schema import Config

from .batch import SequenceBatch
from .step_batch import LocalUpdate, counted_tokens

SumOverReplicas = Callable[[np.ndarray], np.ndarray]
"""Adds up float64 [S] over data-parallel ranks. Collective."""


def fill_targets(
    table: Mapping[str, np.ndarray],
    updates: Sequence[LocalUpdate],
    cfg: Config,
    sum_over_replicas: SumOverReplicas,
    source_means: Mapping[str, float],
) -> tuple[list[LocalUpdate], dict[str, float]]:
    """Give every token its sample's advantage and weight (0 where the token is masked).

    Args:
        table: per-sample arrays [B]: reward, group_index, valid, those of `counted_tokens`, and `sources`, a list of
            names.
        updates: this rank's share of every update of the step, with old and reference log-probs as far as the
            configuration has them.
        cfg: the run's configuration.
        sum_over_replicas: called only for the two options above, by all ranks in the same order.
        source_means: running mean reward by source, for `algorithm.ema_baseline`.

    Returns:
        The updates with `advantages` and `weights`, and the running means with this step taken in.
    """
    reward = table["reward"].copy()
    if cfg.algorithm.kl_place == "reward":
        for update in updates:
            reward[update.update.samples] = _penalised(reward, update, cfg.algorithm.kl_coef, sum_over_replicas)
    sources = list(table["sources"])
    advantages = compute_advantages(
        reward,
        table["group_index"],
        counted_tokens(table, cfg),
        table["valid"],
        AdvantageSpec.from_config(cfg.algorithm),
        running_means=[source_means.get(source, np.nan) for source in sources],
    )
    means = updated_means(source_means, sources, reward, table["valid"], cfg.algorithm.ema_decay)
    return [_filled(update, advantages, cfg, sum_over_replicas) for update in updates], means


def accepted_tokens(batch: SequenceBatch, spec: LossSpec) -> np.ndarray:
    """int64 [S], trainable tokens of each sequence that the corrections of `spec` do not reject."""
    if batch.old_log_probs is None or batch.behaviour_log_probs is None:
        raise ValueError("what is rejected depends on old_log_probs and behaviour_log_probs: fill them in first")
    old, behaviour = (np.where(batch.mask, x, 0.0) for x in (batch.old_log_probs, batch.behaviour_log_probs))
    log_rho = old.astype(np.float64) - behaviour
    sequence = np.repeat(np.arange(len(batch)), batch.lengths)
    totals = np.bincount(sequence, weights=log_rho, minlength=len(batch))
    means = (totals / np.maximum(batch.trainable_counts, 1))[sequence]
    found = correct(torch.from_numpy(log_rho), spec, torch.from_numpy(means))
    kept = batch.mask & ~(found.rejected | found.rejected_sequence).numpy()
    return np.bincount(sequence, weights=kept, minlength=len(batch)).astype(np.int64)


def _penalised(reward: np.ndarray, local: LocalUpdate, coef: float, total: SumOverReplicas) -> np.ndarray:
    """float64 [S], rewards of the update's samples less the KL of their sequence to the reference."""
    batch, mine = local.batch, local.update.local(local.dp_rank)
    if batch.old_log_probs is None or batch.reference_log_probs is None:
        raise ValueError("algorithm.kl_place=reward needs old and reference log-probs: fill them in first")
    own = reward[local.update.samples[mine]]
    penalised = kl_in_reward(own, batch.old_log_probs, batch.reference_log_probs, batch.mask, batch.offsets, coef)
    return total(_at(mine, penalised, len(local.update.samples)))


def _filled(local: LocalUpdate, advantages: np.ndarray, cfg: Config, total: SumOverReplicas) -> LocalUpdate:
    update, batch, mine = local.update, local.batch, local.update.local(local.dp_rank)
    counts, rejected = update.tokens, _rejected_by_routing(batch, cfg.moe.max_routing_mismatch)
    if cfg.algorithm.renormalise_after_rejection:
        kept = accepted_tokens(batch, LossSpec.from_config(cfg.algorithm))
        counts = total(_at(mine, np.where(rejected, 0, kept), len(counts)))
    weights = token_weights(cfg.algorithm.normalisation, counts, constant=float(cfg.rollout.max_response_tokens))
    per_token = np.repeat(np.where(rejected, 0, weights[mine]).astype(np.float32), batch.lengths)
    return local.with_arrays(
        advantages=np.repeat(advantages[update.samples[mine]].astype(np.float32), batch.lengths),
        weights=np.where(batch.mask, per_token, np.float32(0)),
    )


def _rejected_by_routing(batch: SequenceBatch, limit: float | None) -> np.ndarray:
    """bool [S], not where nothing was compared (NaN). The mask stays: GSPO's sums are those before any rejection."""
    if limit is None or batch.routing_mismatch is None:
        return np.zeros(len(batch), dtype=np.bool_)
    return batch.routing_mismatch > limit


def _at(positions: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """float64 [size], `values` at `positions` and 0 elsewhere, so that a sum over ranks puts all shares together."""
    spread = np.zeros(size, dtype=np.float64)
    spread[positions] = values
    return spread
