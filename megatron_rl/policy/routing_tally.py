"""What the routers of a pass did, counted: load, entropy, and where sets differ; reduced over ranks, as metrics.

The load is of the experts that were used, replayed or not, since these cost memory and time; entropy and differences
are of what the routers would choose by themselves.

Rows are tokens that are read, prompt and response alike: what experts a prompt meets decides on every later token. Each
(token, layer) is on one rank only, whatever the layout (rows are split by sequence and context parallelism and over
replicas, layers by pipeline stages), so plain sums over all ranks count it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


class Tally:
    """Counts of one pass on one rank; all on the device, nothing waits for it.

    Args:
        layers: MoE layers of this rank, indices among those of the model.
        num_experts: of a layer.
        num_sequences: S, sequences of this rank's batch.
        compared: names of the sets that live choices are compared with.
    """

    def __init__(
        self, layers: Sequence[int], num_experts: int, num_sequences: int, compared: Sequence[str], device: torch.device
    ) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(len(layers), *shape, dtype=torch.float64, device=device)

        self._slots = {layer: slot for slot, layer in enumerate(layers)}
        self.layers, self.num_sequences, self.compared = list(layers), num_sequences, tuple(compared)
        self.load, self.entropy, self.rows, self.fallbacks = zeros(num_experts), zeros(), zeros(), zeros()
        self.differing = {name: zeros(num_sequences + 1) for name in compared}  # the last one takes the padding
        self.known = {name: zeros(num_sequences + 1) for name in compared}

    def add(
        self,
        layer: int,
        distribution: Tensor,
        live: Tensor,
        used: Tensor,
        sequence: Tensor,
        given: Mapping[str, Tensor],
        replayed: Tensor | None,
    ) -> None:
        """Count one layer's rows of one micro-batch.

        Args:
            distribution: [R, experts] of the router.
            live: int64 [R, top_k], its own choice.
            used: int64 [R, top_k], the experts that computed.
            sequence: int64 [R], of each row, `num_sequences` for padding.
            given: name -> [R, top_k], -1 where there is none.
            replayed: [R, top_k], what was to be replayed, -1 where live choices had to do; None without replay.
        """
        slot, real = self._slots[layer], (sequence < self.num_sequences).double()
        self.load[slot].index_add_(0, used.flatten(), real.repeat_interleave(used.size(1)))
        self.entropy[slot] += (torch.special.entr(distribution).sum(-1).double() * real).sum()
        self.rows[slot] += real.sum()
        if replayed is not None:
            self.fallbacks[slot] += ((replayed[:, 0] < 0) * real).sum()
        for name, sets in given.items():
            known = (sets[:, 0] >= 0).double()
            differs = (sets.long().sort(-1).values != live.sort(-1).values).any(-1)
            self.known[name][slot].index_add_(0, sequence, known)
            self.differing[name][slot].index_add_(0, sequence, known * differs)


@dataclass(frozen=True)
class RoutingCounts:
    """A pass of all ranks, equal on each of them.

    Attributes:
        load: float64 [layers, experts], (token, layer) that each expert computed.
        entropy: [layers], sum over rows of the router's entropy, in nats.
        rows, fallbacks: [layers], rows, and those of them that chose live although sets were replayed.
        known, differing: name -> [layers], rows that were compared, and those with other experts.
    """

    load: np.ndarray
    entropy: np.ndarray
    rows: np.ndarray
    fallbacks: np.ndarray
    known: dict[str, np.ndarray]
    differing: dict[str, np.ndarray]

    def router_metrics(self, layer_names: Sequence[int]) -> dict[str, float]:
        """How the routers spread tokens; `layer_names` are the MoE layers' numbers in the model."""
        mean = self.load.mean(1)
        by_layer = {
            "load_max_over_mean": self.load.max(1) / np.where(mean > 0, mean, 1),
            "entropy": self.entropy / np.maximum(self.rows, 1),
            "dead_experts": (self.load == 0).mean(1),
        }
        found: dict[str, float] = {}
        for name, values in by_layer.items():
            found[f"routing/{name}"] = float(values.mean())
            found |= _named(name, values, layer_names)
        return found

    def mismatch_metrics(self, name: str, layer_names: Sequence[int]) -> dict[str, float]:
        """Share of (token, layer) whose set differs, of all layers and of each; empty where nothing was compared."""
        known = self.known[name]
        if not known.sum():
            return {}
        shares = self.differing[name] / np.maximum(known, 1)
        total = float(self.differing[name].sum() / known.sum())
        return {f"routing/mismatch_{name}": total, **_named(f"mismatch_{name}", shares, layer_names)}


def reduce_tally(tally: Tally, num_layers: int) -> RoutingCounts:
    """Counts of all ranks, for all `num_layers` MoE layers of the model. Collective over all ranks."""
    names = tally.compared
    per_layer = [tally.entropy, tally.rows, tally.fallbacks]
    per_layer += [
        part[name][:, : tally.num_sequences].sum(1) for part in (tally.known, tally.differing) for name in names
    ]
    mine = torch.cat([torch.stack(per_layer, 1), tally.load], 1)
    table = mine.new_zeros(num_layers, mine.size(1))
    table[tally.layers] = mine
    dist.all_reduce(table)
    columns = table.cpu().numpy().T
    entropy, rows, fallbacks = columns[:3]
    known, differing = (dict(zip(names, columns[3 + i * len(names) :], strict=False)) for i in range(2))
    return RoutingCounts(columns[len(per_layer) :].T, entropy, rows, fallbacks, known, differing)


def sequence_mismatch(tally: Tally, name: str) -> np.ndarray:
    """float32 [S], share of (token, layer) of each sequence of this replica whose set differs; NaN where none is known.

    Collective over the replica, whose ranks have parts of the rows and layers.
    """
    from megatron.core import parallel_state

    counts = torch.stack([part[name][:, : tally.num_sequences].sum(0) for part in (tally.known, tally.differing)])
    dist.all_reduce(counts, group=parallel_state.get_model_parallel_group())
    dist.all_reduce(counts, group=parallel_state.get_context_parallel_group())
    known, differing = counts.cpu().numpy()
    with np.errstate(invalid="ignore"):
        shares: np.ndarray = (differing / known).astype(np.float32)
    return shares


def _named(name: str, values: np.ndarray, layer_names: Sequence[int]) -> dict[str, float]:
    return {f"routing/{name}_layer_{layer}": float(v) for layer, v in zip(layer_names, values, strict=True)}
