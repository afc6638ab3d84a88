"""How a policy's routers run in each of its passes, as section `moe` says, and what is told about them afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core import parallel_state

from megatron_rl.policy.batch import Routes, SequenceBatch
from megatron_rl.policy.exchange import sum_over_data_parallel
from megatron_rl.policy.reduction import largest_of_all_ranks
from megatron_rl.policy.replay import Routing, RoutingPass
from megatron_rl.policy.routing_tally import RoutingCounts, reduce_tally, sequence_mismatch

if TYPE_CHECKING:
    from megatron_rl.config import Config, HfConfig


@dataclass(frozen=True)
class RoutingFound:
    """What the pass before the updates found; nothing in a dense model.

    Attributes:
        old_routes: the live choices of this rank's layers and rows.
        mismatch: float32 [S], see `SequenceBatch.routing_mismatch`; None without routes of the engine.
        metrics: equal on all ranks.
    """

    old_routes: Routes | None = None
    mismatch: np.ndarray | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Routers:
    """All routers of a policy on this rank; none in a dense model, where passes are None and nothing is found."""

    def __init__(self, chunks: Sequence[torch.nn.Module], hf: HfConfig, cfg: Config) -> None:
        self._mode, self._limit, self._names = cfg.moe.routing_replay, cfg.moe.max_routing_mismatch, hf.moe_layers
        self._routing: Routing | None = None
        if hf.moe is not None:
            shard = (0, 1)
            if cfg.parallel.sequence_parallel:
                shard = (
                    parallel_state.get_tensor_model_parallel_rank(),
                    parallel_state.get_tensor_model_parallel_world_size(),
                )
            self._routing = Routing(chunks, hf, shard)

    @contextmanager
    def before_updates(self, batch: SequenceBatch) -> Iterator[RoutingPass | None]:
        """The pass for old log-probs: R3 replays the engine's sets, all others route live; choices are recorded."""
        if self._routing is None:
            yield None
            return
        engine = {} if batch.routes is None else {"engine": batch.routes}
        replay = batch.routes if self._mode == "R3" else None
        with self._routing.begin(batch, replay=replay, compare=engine, record=True) as run:
            yield run

    def found(self, run: RoutingPass | None) -> RoutingFound:
        """What `before_updates` found. Collective over all ranks."""
        if run is None or run.tally is None:
            return RoutingFound()
        metrics: dict[str, float] = {}
        mismatch = None
        if "engine" in run.tally.compared:
            mismatch = sequence_mismatch(run.tally, "engine")
            metrics = self._mismatch(reduce_tally(run.tally, len(self._names)), "engine", mismatch)
            if self._limit is not None:
                rejected = sum_over_data_parallel(np.array([(mismatch > self._limit).sum()]))
                metrics["routing/rejected_sequences"] = float(rejected[0])
        return RoutingFound(run.recorded(), mismatch, metrics)

    @contextmanager
    def updating(self, batch: SequenceBatch, replays: bool) -> Iterator[RoutingPass | None]:
        """The pass of an update.

        Args:
            replays: use the sets that `moe.routing_replay` names; otherwise live ones, and nothing is counted.

        Raises:
            ValueError: the batch does not have those sets.
        """
        if self._routing is None:
            yield None
            return
        replay = {"R2": batch.old_routes, "R3": batch.routes}.get(self._mode) if replays else None
        if replays and self._mode != "off" and replay is None:
            missing, source = ("old_routes", "log_probs") if self._mode == "R2" else ("routes", "the engine")
            raise ValueError(
                f"moe.routing_replay={self._mode}, but SequenceBatch.{missing} is not set: {source} has them"
            )
        compare = {} if batch.old_routes is None else {"old": batch.old_routes}
        if batch.routes is not None and batch.routing_mismatch is None:  # no pass before this one has compared them
            compare["engine"] = batch.routes
        with self._routing.begin(batch, replay=replay, compare=compare, backward=True, count=replays) as run:
            yield run

    def metrics(self, run: RoutingPass | None) -> dict[str, float]:
        """Of an update, equal on all ranks; none where nothing was counted. Collective over all ranks."""
        if run is None or run.tally is None:
            return {}
        counts = reduce_tally(run.tally, len(self._names))
        found = counts.router_metrics(self._names)
        for name in run.tally.compared:
            found |= self._mismatch(counts, name, sequence_mismatch(run.tally, name))
        if run.replays:
            found["routing/live_rows"] = float(counts.fallbacks.mean())
            found["routing/live_share"] = float(counts.fallbacks.sum() / max(counts.rows.sum(), 1))
        return found

    def _mismatch(self, counts: RoutingCounts, name: str, of_sequences: np.ndarray) -> dict[str, float]:
        """With one set, of all layers, of each, and of the worst sequence. Collective over all ranks."""
        found = counts.mismatch_metrics(name, self._names)
        if found:
            found[f"routing/mismatch_{name}_max"] = largest_of_all_ranks(float(np.nanmax(of_sequences, initial=0)))
        return found
