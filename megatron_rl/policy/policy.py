"""The policy that is trained: one Megatron model on all trainer ranks, with its optimizer and its frozen reference.

Every method here is collective: all ranks call it, in the same order, with the same plan and with their own
data-parallel rank's batch. What a micro-batch computes is in `forward.py`; when to train, save or publish weights is
decided in `train.py`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.algorithms.token_statistics import finalise_metrics
from megatron_rl.config import Config, HfConfig, read_hf_config
from megatron_rl.policy import checkpoint
from megatron_rl.policy.batch import Routes, SequenceBatch
from megatron_rl.policy.checkpoint import CheckpointError, first_line
from megatron_rl.policy.distributed import device, peer_failure
from megatron_rl.policy.exchange import on_every_rank, on_rank_zero
from megatron_rl.policy.forward import LogProbHead, LossHead, Projection, run_schedule, sum_gradients
from megatron_rl.policy.microbatch import Plan
from megatron_rl.policy.model import build_model
from megatron_rl.policy.offload import TrainingMemory
from megatron_rl.policy.optimizer import Optimizer, wrap_for_gradients
from megatron_rl.policy.packing import MicroBatch, RowShare, pack, unpack
from megatron_rl.policy.reduction import (
    Totals,
    all_ranks_agree,
    gather_non_finite_samples,
    reduce_reports,
    rows_of_all_ranks,
    sum_over_context,
)
from megatron_rl.policy.reference import LogProbCache, ReferenceWeights
from megatron_rl.policy.sharded_state import load_training_state, save_training_state
from megatron_rl.weights.load import load_hf_weights

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from megatron_rl.policy.replay import RoutingPass

logger = logging.getLogger(__name__)

SFT = LossSpec(kind="nll")


class PolicyError(RuntimeError):
    """Training cannot go on; the message says why and what to change."""


@dataclass(frozen=True)
class LogProbs:
    """Per-token results of a forward pass, float32 [T], aligned with `batch.tokens`; 0 where not trainable.

    With experts also `old_routes` and `routing_mismatch` of the batch, and metrics of the routing.
    """

    log_probs: np.ndarray
    entropy: np.ndarray | None
    old_routes: Routes | None = None
    routing_mismatch: np.ndarray | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Policy:
    """See `build`. `chunks` are the bare Megatron models of this rank, one per virtual pipeline stage."""

    def __init__(self, chunks: Sequence[GPTModel], hf: HfConfig, cfg: Config) -> None:
        from megatron.core import parallel_state

        from megatron_rl.policy.routing import Routers

        self.chunks = list(chunks)
        self.hf, self._cfg = hf, cfg
        self.data_parallel_rank = parallel_state.get_data_parallel_rank()
        self._share = RowShare(
            cfg.parallel.sequence_multiple,
            cfg.parallel.row_multiple,
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_context_parallel_rank(),
        )
        self._is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        self._projection = Projection(
            hf.vocab_size,
            parallel_state.get_tensor_model_parallel_group(),
            cfg.parallel.sequence_parallel,
            cfg.loss.chunk_tokens,
            cfg.loss.logprob_backend,
        )
        self._routers = Routers(self.chunks, hf, cfg)
        self._wrapped = wrap_for_gradients(self.chunks, cfg.parallel.use_distributed_optimizer)
        for chunk in self.chunks:
            chunk.config.finalize_model_grads_func = sum_gradients
        self.optimizer = Optimizer(
            self._wrapped, cfg.optimizer, getattr(torch, cfg.model.dtype), cfg.parallel.use_distributed_optimizer
        )
        self.memory = TrainingMemory(self._wrapped, self.optimizer)
        self.learning_rate = cfg.optimizer.lr
        self.reference: ReferenceWeights | None = None
        self._reference_cache = LogProbCache()
        self._skipped_in_a_row = 0

    @classmethod
    def build(cls, cfg: Config) -> Policy:
        """Build the model in the configured layout and load the Hugging Face weights of `model.path`.

        `policy.distributed.initialize` must have run on all ranks.
        """
        hf = read_hf_config(cfg.model.path)
        chunks = build_model(hf, cfg.model, cfg.parallel)
        load_hf_weights(chunks, hf, cfg.model.path)
        return cls(chunks, hf, cfg)

    # ------------------------------------------------------------------------------------------------ forward passes

    def log_probs(self, batch: SequenceBatch, plan: Plan, with_entropy: bool = False) -> LogProbs:
        """Log-probs (and full-vocabulary entropy) of the trainable tokens under the current weights.

        Args:
            batch: this data-parallel rank's sequences, `plan.sequences(dp_rank)` in that order.
            plan: of `plan_microbatches`, the same on all ranks.

        Returns:
            The same arrays on every rank of the model replica; old_routes are those of this rank's layers and rows.
        """
        with self._routers.before_updates(batch) as routing:
            rows = self._forward(batch, plan, with_entropy, routing)
        found = self._routers.found(routing)
        entropy = rows[1] if with_entropy else None
        return LogProbs(rows[0], entropy, found.old_routes, found.mismatch, found.metrics)

    def _forward(
        self, batch: SequenceBatch, plan: Plan, with_entropy: bool, routing: RoutingPass | None = None
    ) -> np.ndarray:
        """float32 [1 or 2, T], log-probs and entropy."""
        microbatches = self._pack(batch, plan)
        self._set_training(False)
        with torch.no_grad():
            reports = run_schedule(
                self._wrapped,
                microbatches,
                LogProbHead(self._projection, with_entropy),
                forward_only=True,
                routing=routing,
            )
        columns = 2 if with_entropy else 1
        rows = np.zeros((columns, batch.num_tokens), dtype=np.float32)
        if self._is_last_stage:
            for column in range(columns):
                outputs = ((m, report[column]) for m, report in zip(microbatches, reports, strict=True))
                rows[column] = unpack(outputs, batch.num_tokens)
        return rows_of_all_ranks(rows)

    def freeze_reference(self) -> None:
        """Make the current weights the reference policy, if the loss has a KL term; to be called before RL begins."""
        if self._cfg.algorithm.kl_coef > 0:
            self._set_reference(ReferenceWeights(self.chunks))

    def reference_log_probs(self, batch: SequenceBatch, plan: Plan) -> np.ndarray:
        """float32 [T], as `log_probs`, under the reference weights; from the cache when every rank has all of it."""
        assert self.reference is not None
        cached = self._reference_cache.get(batch)
        if all_ranks_agree(cached is not None):
            assert cached is not None
            return cached
        with self.reference.swapped_in():
            log_probs = self._forward(batch, plan, with_entropy=False)[0]  # the reference routes live
        self._reference_cache.put(batch, log_probs)
        return log_probs

    # ------------------------------------------------------------------------------------------------------- updates

    def train_step(self, batch: SequenceBatch, plan: Plan, spec: LossSpec) -> dict[str, float]:
        """One optimizer update on `batch`.

        Args:
            batch: as for `log_probs`, with `weights` and `advantages`, `old_log_probs` unless the ratio is to be 1,
                and `reference_log_probs` when the spec has a KL term. `weights` are normalised over the whole update.
            plan: as for `log_probs`.
            spec: the loss.

        Returns:
            Metrics, equal on all ranks: those of tokens divided by the trainable tokens of the whole batch;
            `optimizer/grad_norm` before clipping; `optimizer/skipped` 1 when a loss, a gradient or an input was not
            finite, so that the weights are unchanged.

        Raises:
            PolicyError: too many updates in a row were skipped; names the samples.
        """
        totals, routing = self._accumulate_and_apply(batch, plan, spec)
        return finalise_metrics(totals.sums, totals.counts) | {
            "policy/tokens": float(totals.counts.tokens),
            "policy/sequences": float(totals.counts.sequences),
            "policy/microbatches": float(plan.num_microbatches),
            "optimizer/grad_norm": totals.grad_norm,
            "optimizer/lr": self.learning_rate,
            "optimizer/skipped": float(not totals.finite),
            **routing,
        }

    def sft_step(self, batch: SequenceBatch, plan: Plan, learning_rate: float) -> dict[str, float]:
        """One supervised update: `-Σ weight * log_prob` of the trainable tokens, otherwise as `train_step`."""
        self.set_learning_rate(learning_rate)
        totals, _ = self._accumulate_and_apply(batch, plan, SFT)
        return {
            "sft/loss": float(totals.sums["loss"]),
            "sft/grad_norm": totals.grad_norm,
            "sft/lr": self.learning_rate,
            "sft/tokens": float(totals.counts.tokens),
        }

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use this rate from the next update on."""
        self.learning_rate = learning_rate
        self.optimizer.set_learning_rate(learning_rate)

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments, so that RL does not start with those of the supervised warm-up."""
        self.optimizer.reset_state()

    def _accumulate_and_apply(
        self, batch: SequenceBatch, plan: Plan, spec: LossSpec
    ) -> tuple[Totals, dict[str, float]]:
        """Gradients, agreement of all ranks that everything is finite, then the update; and metrics of the routing."""
        microbatches = self._pack(batch, plan)
        self._set_training(True)
        self.optimizer.zero_grad()
        is_rl = spec is not SFT
        head = LossHead(spec, self._projection, with_entropy=is_rl, sum_over_context=sum_over_context())
        with self._routers.updating(batch, replays=is_rl) as routing:
            reports = run_schedule(self._wrapped, microbatches, head, forward_only=False, routing=routing)
        totals = reduce_reports(batch, reports, self.optimizer.gradient_norm())
        if totals.finite:
            self.optimizer.apply(totals.grad_norm)
            self._skipped_in_a_row = 0
        else:
            self._skip(microbatches, reports, totals)
        return totals, self._routers.metrics(routing)

    def _skip(self, microbatches: list[MicroBatch], reports: list[Any], totals: Totals) -> None:
        """Name the samples; end the run when this happens too often."""
        self._skipped_in_a_row += 1
        names = gather_non_finite_samples(microbatches, reports)
        message = (
            f"update skipped, weights unchanged: {totals.non_finite_tokens} tokens with a non-finite value, gradient "
            f"norm {totals.grad_norm}; samples: {', '.join(names[:20]) or 'none, the gradient itself overflowed'}"
        )
        limit = self._cfg.optimizer.max_skipped_steps
        if self._skipped_in_a_row >= limit:
            raise PolicyError(
                f"{message}. This was number {self._skipped_in_a_row} in a row (optimizer.max_skipped_steps={limit}): "
                "lower optimizer.lr, look at these samples in the rollout dump, or resume from an earlier checkpoint"
            )
        if dist.get_rank() == 0:
            logger.error("%s", message)

    # ------------------------------------------------------------------------------------------------ weights, state

    def save(self, run_dir: Path, step: int, extra: Mapping[str, Any], metric: float | None) -> Path:
        """Write the checkpoint of `step` as one atomic unit, and remove old ones as section `checkpoint` says.

        Args:
            run_dir: the run's directory, shared by all ranks.
            step: RL steps that were trained.
            extra: the loop's own state by name, bytes or what JSON can hold; rank 0's is written.
            metric: value of `checkpoint.metric`; None when it was not measured.

        Raises:
            CheckpointError: on every rank, when it cannot be written.
        """
        folder = checkpoint.temporary(run_dir, step)
        on_rank_zero(lambda: checkpoint.begin(run_dir, step), CheckpointError)
        try:
            digests = save_training_state(folder, self.chunks, self.optimizer, self.reference)
        except Exception as error:  # torch and Megatron raise whatever a full disk leads to
            if peer_failure(error) is not None:
                raise
            logger.warning("writing %s failed", folder, exc_info=True)
            raise CheckpointError(
                f"{folder} cannot be written ({type(error).__name__}: {first_line(error)}); "
                "make room, then go on with --resume"
            ) from error
        parallel = self._cfg.parallel.model_dump()
        config_hash = hashlib.sha256(self._cfg.model_dump_json().encode()).hexdigest()
        kept = self._cfg.checkpoint

        def complete() -> None:
            checkpoint.complete(
                run_dir,
                step,
                extra,
                metric=metric,
                layout=parallel,
                config_hash=config_hash,
                model=self.hf.shape,
                digests=digests,
            )
            checkpoint.prune(run_dir, kept.keep_last, kept.keep_best)

        on_rank_zero(complete, CheckpointError)
        return folder.with_name(folder.name.removeprefix(".tmp-"))

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore what `save` wrote, at this or another layout, and return its `extra`.

        The learning rate stays the one that is set; checkpoints of later steps are removed, since they will be
        written again.

        Raises:
            CheckpointError: on every rank; the checkpoint is damaged, or of another model.
        """
        on_rank_zero(
            lambda: checkpoint.require_model(folder, checkpoint.verify(folder), self.hf.shape, self._cfg.model.path),
            CheckpointError,
        )
        rank, world = dist.get_rank(), dist.get_world_size()
        on_every_rank(lambda: checkpoint.verify_contents(folder, rank, world), CheckpointError)
        if self._cfg.algorithm.kl_coef > 0 and self.reference is None:
            self._set_reference(ReferenceWeights(self.chunks))
        has_reference = self._load_state(folder)
        self._set_reference(self.reference if has_reference else None)
        self.set_learning_rate(self.learning_rate)
        on_rank_zero(
            lambda: checkpoint.discard_after(folder.parent.parent, checkpoint.step_of(folder)), CheckpointError
        )
        return checkpoint.read_extra(folder)

    def _load_state(self, folder: Path) -> bool:
        try:
            return load_training_state(folder, self.chunks, self.optimizer, self.reference)
        except Exception as error:  # torch and Megatron raise whatever damaged bytes lead to
            if peer_failure(error) is not None:
                raise
            logger.warning("loading %s failed", folder, exc_info=True)
            raise checkpoint.unreadable(folder, folder / "policy", error) from error

    # ------------------------------------------------------------------------------------------------------ plumbing

    def _set_reference(self, reference: ReferenceWeights | None) -> None:
        self.reference, self._reference_cache = reference, LogProbCache()

    def _set_training(self, training: bool) -> None:
        for chunk in self._wrapped:
            if chunk.training != training:
                chunk.train(training)

    def _pack(self, batch: SequenceBatch, plan: Plan) -> list[MicroBatch]:
        rank = self.data_parallel_rank
        expected = len(plan.sequences(rank))
        if len(batch) != expected:
            raise ValueError(
                f"the plan gives data-parallel rank {rank} {expected} sequences, its batch has {len(batch)}: "
                "pass batch.select(plan.sequences(rank)) of the planned batch"
            )
        return [pack(batch, indices, self._share, device()) for indices in plan.local(rank)]
