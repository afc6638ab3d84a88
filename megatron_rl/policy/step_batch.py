"""From one step's table of samples to its optimizer updates: which samples, in which micro-batches; pure.

Every rank computes the same updates from the same table, so nothing needs to be agreed on: each data-parallel leader
then pulls just its own samples. No group process, no HTTP and no tokens are known here; what the tokens of an update
aim at (advantages and weights) is in `step_targets`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_rl.config.schema import Config

from .batch import Routes, SequenceBatch
from .microbatch import Plan, plan_microbatches


@dataclass(frozen=True)
class Update:
    """One optimizer update.

    Attributes:
        samples: int64 [S], rows of the step's table, all data-parallel ranks; each has a trainable token.
        tokens: int64 [S], trainable tokens N_i of each sample.
        plan: micro-batches of every data-parallel rank; its indices are positions in `samples`.
    """

    samples: np.ndarray
    tokens: np.ndarray
    plan: Plan

    def local(self, dp_rank: int) -> np.ndarray:
        """Positions in `samples` that this rank pulls and trains on, ascending."""
        return np.asarray(self.plan.sequences(dp_rank), dtype=np.int64)


@dataclass(frozen=True)
class LocalUpdate:
    """One optimizer update as one data-parallel rank sees it.

    Attributes:
        update: of all ranks.
        dp_rank: whose share this is.
        batch: its own sequences, those of `update.local(dp_rank)` in that order.
        metrics: found before the update, equal on all ranks.
    """

    update: Update
    dp_rank: int
    batch: SequenceBatch
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        """Micro-batches of every data-parallel rank."""
        return self.update.plan

    def with_arrays(self, **arrays: np.ndarray | Routes | None) -> LocalUpdate:
        """The same update with optional fields of its batch filled in, e.g. `old_log_probs`."""
        return replace(self, batch=self.batch.with_arrays(**arrays))


def plan_step(table: Mapping[str, np.ndarray], cfg: Config, step: int) -> list[Update]:
    """Deal a step's groups over `algorithm.updates_per_batch` updates and plan each one.

    Args:
        table: per-sample arrays [B]: group_index, prompt_length, response_length, and those of `counted_tokens`.
        cfg: the run's configuration.
        step: seeds the order in which groups are dealt.

    Samples without a trainable token are neither counted nor computed.
    """
    tokens = counted_tokens(table, cfg)
    return [_update(rows[tokens[rows] > 0], table, tokens, cfg) for rows in _deal_groups(table, cfg, step)]


def counted_tokens(table: Mapping[str, np.ndarray], cfg: Config) -> np.ndarray:
    """int64 [B], trainable tokens N_i of each sample; 0 for one that does not take part in the loss.

    Args:
        table: per-sample arrays [B]: trainable_tokens (0 for a sample that is masked as a whole), valid (finite
            reward), informative (its group's correctness varies).
        cfg: the run's configuration; `rollout.dynamic_sampling` may mask uninformative groups.
    """
    tokens = np.where(table["valid"], table["trainable_tokens"], 0)
    return np.where(table["informative"], tokens, 0) if cfg.rollout.dynamic_sampling == "mask" else tokens


def _deal_groups(table: Mapping[str, np.ndarray], cfg: Config, step: int) -> list[np.ndarray]:
    """Rows of each update: whole groups, in a seeded order, so that no update sees only the first prompts."""
    group_index = table["group_index"]
    order = np.random.default_rng([cfg.seed, step]).permutation(np.unique(group_index))
    parts = np.array_split(order, cfg.algorithm.updates_per_batch)
    return [np.flatnonzero(np.isin(group_index, part)) for part in parts]


def _update(rows: np.ndarray, table: Mapping[str, np.ndarray], tokens: np.ndarray, cfg: Config) -> Update:
    return Update(rows, tokens[rows], plan_lengths(table["prompt_length"][rows] + table["response_length"][rows], cfg))


def plan_lengths(lengths: Sequence[int] | np.ndarray, cfg: Config) -> Plan:
    """`plan_microbatches` of sequences of so many tokens, with cap and layout of the run."""
    return plan_microbatches(
        lengths,
        dp_size=cfg.parallel.data_parallel_size,
        max_tokens=cfg.algorithm.max_tokens_per_microbatch,
        multiple_of=cfg.parallel.microbatch_multiple,
        sequence_multiple=cfg.parallel.sequence_multiple,
    )
