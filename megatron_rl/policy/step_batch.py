"""From one step's table of samples to its optimizer updates: advantages, weights and micro-batch plans; pure.

Every rank computes the same `StepPlan` from the same table, so nothing needs to be agreed on: each data-parallel leader
then pulls just its own samples. No group process, no HTTP and no tokens are known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_rl.algorithms.advantages import compute_advantages
from megatron_rl.algorithms.normalisation import token_weights
from megatron_rl.algorithms.spec import AdvantageSpec
from megatron_rl.config.schema import Config

from .batch import SequenceBatch
from .microbatch import Plan, plan_microbatches


@dataclass(frozen=True)
class Update:
    """One optimizer update.

    Attributes:
        samples: int64 [S], rows of the step's table, all data-parallel ranks.
        advantages: float32 [S], one per sample.
        weights: float32 [S], the normaliser of each trainable token of a sample (ALGORITHMS: weight[i,t] without m).
        plan: micro-batches of every data-parallel rank; its indices are positions in `samples`.
    """

    samples: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    plan: Plan

    def local(self, dp_rank: int) -> np.ndarray:
        """Positions in `samples` that this rank pulls and trains on, ascending."""
        return np.asarray(self.plan.sequences(dp_rank), dtype=np.int64)

    def fill(self, batch: SequenceBatch, dp_rank: int) -> SequenceBatch:
        """Give every token of the pulled batch its sample's advantage and weight (0 where the token is masked)."""
        mine = self.local(dp_rank)
        advantages = np.repeat(self.advantages[mine], batch.lengths)
        weights = np.where(batch.mask, np.repeat(self.weights[mine], batch.lengths), np.float32(0))
        return batch.with_arrays(advantages=advantages.astype(np.float32), weights=weights.astype(np.float32))


def plan_step(table: Mapping[str, np.ndarray], cfg: Config, step: int) -> list[Update]:
    """Deal a step's groups over `algorithm.updates_per_batch` updates and plan each one.

    Args:
        table: per-sample arrays [B]: reward f64, group_index, prompt_length, response_length, trainable_tokens (0 for a
            sample that is masked as a whole), valid (finite reward), informative (its group's correctness varies).
        cfg: the run's configuration.
        step: seeds the order in which groups are dealt.

    Samples without a trainable token take part in their group's statistics but are neither counted nor computed.
    """
    tokens = np.where(table["valid"], table["trainable_tokens"], 0)
    if cfg.rollout.dynamic_sampling == "mask":
        tokens = np.where(table["informative"], tokens, 0)
    advantages = compute_advantages(
        table["reward"], table["group_index"], tokens, table["valid"], AdvantageSpec.from_config(cfg.algorithm)
    )
    return [_update(rows, table, tokens, advantages, cfg) for rows in _deal_groups(table["group_index"], cfg, step)]


def _deal_groups(group_index: np.ndarray, cfg: Config, step: int) -> list[np.ndarray]:
    """Rows of each update: whole groups, in a seeded order, so that no update sees only the first prompts."""
    groups = np.unique(group_index)
    order = np.random.default_rng([cfg.seed, step]).permutation(groups)
    parts = np.array_split(order, cfg.algorithm.updates_per_batch)
    return [np.flatnonzero(np.isin(group_index, part)) for part in parts]


def _update(
    rows: np.ndarray, table: Mapping[str, np.ndarray], tokens: np.ndarray, advantages: np.ndarray, cfg: Config
) -> Update:
    rows = rows[tokens[rows] > 0]
    weights = token_weights(cfg.algorithm.normalisation, tokens[rows], constant=float(cfg.rollout.max_response_tokens))
    plan = plan_microbatches(
        table["prompt_length"][rows] + table["response_length"][rows],
        dp_size=cfg.parallel.data_parallel_size,
        max_tokens=cfg.algorithm.max_tokens_per_microbatch,
        multiple_of=cfg.parallel.microbatch_multiple,
    )
    return Update(rows, advantages[rows].astype(np.float32), np.asarray(weights, dtype=np.float32), plan)
