"""Which experts the routers of this rank use: their own choice, or one that is given; no files and no losses here.

Megatron asks `router.router_replay` for the experts of a layer's rows, and takes their weights from the scores of this
very pass: g_e = 1[e in S] s_e / sum_{j in S} s_j for the set S. So a router learns whatever S is (R3, 2510.11370). Its
own class lists all instances of a process in one global list and keeps one set of indices for the micro-batch at hand;
here each policy has its own, and each forward step reads what is given for exactly the rows that it computes: those of
its micro-batch, its layers, its part of the sequences.

Recomputation in the backward pass uses the very sets of the forward pass, replayed or not, so that rounding cannot send
a token to other experts there. Micro-batches come back in the order in which each model chunk ran them, in every
schedule, so a queue for each router is enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from megatron_rl.policy.batch import Routes, SequenceBatch
from megatron_rl.policy.routes import ArrayRoutes, local_routes
from megatron_rl.policy.routing_tally import Tally
from megatron_rl.routes.store import id_dtype

if TYPE_CHECKING:
    from megatron_rl.config import HfConfig
    from megatron_rl.config.hf_experts import MoeShape
    from megatron_rl.policy.packing import MicroBatch


class RouterChoice(RouterReplay):
    """Megatron's hook between the scores of one router and its choice.

    Attributes:
        layer: index among the MoE layers of the model.
        step: the forward step in progress; None outside of one.
    """

    def __init__(self, router: TopKRouter, layer: int) -> None:
        super().__init__()
        RouterReplay.global_router_replay_instances.remove(self)  # Megatron's list of all models in the process
        self.layer = layer
        self.step: _Step | None = None
        self._router = router
        self._to_recompute: deque[Tensor] = deque()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices [rows, top_k] of the experts to use, from `scores` [rows, experts]; see Megatron's."""
        assert default_compute_topk is not None
        if self.step is None and self._to_recompute:
            used = self._to_recompute.popleft()
            return scores.gather(1, used), used
        values, live = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.step is None:
            return values, live
        used = self.step.choose(self, scores.detach(), live)
        if self.step.backward and not torch.is_grad_enabled():  # as only a pass that is recomputed does
            self._to_recompute.append(used)
        return (values, live) if used is live else (scores.gather(1, used), used)

    def forget(self) -> int:
        """Drop what was never recomputed; returns how many forward passes that were."""
        left = len(self._to_recompute)
        self._to_recompute.clear()
        return left

    def distribution(self, scores: Tensor) -> Tensor:
        """float32 [rows, experts], what the router makes of its logits, each row adding up to 1."""
        config = self._router.config
        if config.moe_router_score_function == "sigmoid":
            bias = self._router.expert_bias
            plain = scores.float() if bias is None else scores.float() - bias
            return plain / plain.sum(-1, keepdim=True).clamp_min(1e-20)
        return scores.float() if config.moe_router_pre_softmax else scores.float().softmax(-1)


class Routing:
    """The routers of one policy on this rank; made once, after its chunks were built.

    Args:
        chunks: the bare Megatron models of this rank.
        hf: the model's facts; it has experts.
        sequence_shard: (index, count) of this rank's part of the rows that a router sees, (0, 1) for all of them.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], hf: HfConfig, sequence_shard: tuple[int, int]) -> None:
        assert hf.moe is not None
        self.shape, self.num_layers, self._shard = hf.moe, len(hf.moe_layers), sequence_shard
        self.choices: dict[torch.nn.Module, list[RouterChoice]] = {}
        for chunk in chunks:
            found = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            for router in found:
                router.router_replay = RouterChoice(router, hf.moe_layers.index(router.layer_number - 1))
            self.choices[chunk] = [router.router_replay for router in found]

    @contextmanager
    def begin(
        self,
        batch: SequenceBatch,
        *,
        replay: Routes | None = None,
        compare: Mapping[str, Routes] | None = None,
        record: bool = False,
        backward: bool = False,
        count: bool = True,
    ) -> Iterator[RoutingPass]:
        """One pass of the micro-batches of `batch` over all chunks.

        Args:
            replay: the experts to use where it has some; live choices elsewhere.
            compare: sets that the LIVE choices are compared with, by name.
            record: keep the live choices; see `RoutingPass.recorded`.
            backward: gradients are computed, maybe with recomputation.
            count: fill in `RoutingPass.tally`.

        Raises:
            RuntimeError: the backward pass did not recompute what the forward pass left to it.
        """
        run = RoutingPass(self, batch, replay, compare or {}, record, backward, count)
        try:
            yield run
        except BaseException:
            self._forget()
            raise
        if left := self._forget():
            raise RuntimeError(
                f"{left} router passes were not recomputed: Megatron's order of recomputation has changed"
            )

    def local_rows(self, destination: np.ndarray) -> np.ndarray:
        """The part of a micro-batch's rows [R] that this rank's routers see."""
        index, count = self._shard
        size = destination.size // count
        return destination[index * size : (index + 1) * size]

    def _forget(self) -> int:
        return sum(choice.forget() for choices in self.choices.values() for choice in choices)


class RoutingPass:
    """One pass over one batch: gives each router its sets, and counts what the routers choose.

    Attributes:
        tally: what was counted so far on this rank; None if nothing is.
        replays: whether there are sets to use.
    """

    def __init__(
        self,
        routing: Routing,
        batch: SequenceBatch,
        replay: Routes | None,
        compare: Mapping[str, Routes],
        record: bool,
        backward: bool,
        count: bool,
    ) -> None:
        self.routing, self._batch, self._record, self._backward = routing, batch, record, backward
        self._replay, self._compare = replay, compare
        self.replays = replay is not None
        self._layers = sorted(choice.layer for choices in routing.choices.values() for choice in choices)
        device = next((p.device for chunk in routing.choices for p in chunk.parameters()), torch.device("cpu"))
        self.tally: Tally | None = None
        if count:
            self.tally = Tally(self._layers, routing.shape.num_experts, len(batch), tuple(compare), device)
        self._recorded: dict[int, list[np.ndarray]] = {layer: [] for layer in self._layers}
        self._places: dict[int, list[np.ndarray]] = {layer: [] for layer in self._layers}

    @contextmanager
    def forward(self, microbatch: MicroBatch, chunk: torch.nn.Module) -> Iterator[None]:
        """The routers of `chunk` are about to see the rows of `microbatch`, once each."""
        choices = self.routing.choices[chunk]
        if not choices:  # ordinary layers only
            yield
            return
        step = _Step(self, microbatch, [choice.layer for choice in choices])
        for choice in choices:
            choice.step = step
        try:
            yield
        finally:
            for choice in choices:
                choice.step = None
        if self._record:
            self._keep(step)

    def _keep(self, step: _Step) -> None:
        real = step.destination >= 0
        found = torch.stack([step.live[layer] for layer in step.layers]).cpu().numpy()[:, real]
        for layer, values in zip(step.layers, found, strict=True):
            self._recorded[layer].append(values)
            self._places[layer].append(step.destination[real] - 1)

    def recorded(self) -> Routes:
        """The live choices of this rank's layers and rows, after the pass with `record`."""
        top_k = self.routing.shape.top_k
        if not self._layers:
            return ArrayRoutes((), self._batch.offsets, np.zeros(0, np.int64), np.zeros((0, 0, top_k), np.int16))
        places = np.concatenate(self._places[self._layers[0]])  # the same of all layers: each chunk runs all of them
        order = np.argsort(places)
        values = np.stack([np.concatenate(self._recorded[layer])[order] for layer in self._layers])
        return ArrayRoutes(self._layers, self._batch.offsets, places[order], values)


class _Step:
    """One micro-batch on one chunk."""

    def __init__(self, run: RoutingPass, microbatch: MicroBatch, layers: list[int]) -> None:
        self._run, self.layers, self.backward = run, layers, run._backward
        self.live: dict[int, Tensor] = {}
        offsets = run._batch.offsets
        self.destination = run.routing.local_rows(microbatch.destination)
        sequence = np.where(
            self.destination >= 0, np.searchsorted(offsets, self.destination, side="right") - 1, len(offsets) - 1
        )
        device = microbatch.targets.device
        self._sequence = torch.from_numpy(sequence).to(device)
        read: dict[int, Tensor] = {}  # what is replayed is often compared with as well

        def given(routes: Routes) -> Tensor:
            if id(routes) not in read:
                shape: MoeShape = run.routing.shape
                found = local_routes(routes, layers, offsets, self.destination, shape.top_k, shape.num_experts)
                read[id(routes)] = torch.from_numpy(found).to(device, non_blocking=True)
            return read[id(routes)]

        self._replay = None if run._replay is None else given(run._replay)
        self._compare = {name: given(routes) for name, routes in run._compare.items()}

    @torch.no_grad()
    def choose(self, choice: RouterChoice, scores: Tensor, live: Tensor) -> Tensor:
        """Indices [rows, top_k] to use."""
        slot, run = self.layers.index(choice.layer), self._run
        replayed = None if self._replay is None else self._replay[slot].long()
        used = live if replayed is None else torch.where(replayed >= 0, replayed, live)
        if run.tally is not None:
            compared = {name: sets[slot] for name, sets in self._compare.items()}
            run.tally.add(choice.layer, choice.distribution(scores), live, used, self._sequence, compared, replayed)
        if run._record:
            self.live[choice.layer] = live.to(getattr(torch, id_dtype(run.routing.shape.num_experts).name))
        return used
