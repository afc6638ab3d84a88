"""Choices of experts between where they are kept and the rows of a micro-batch; plain arrays, no routers here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from megatron_rl.policy.batch import Routes


class ArrayRoutes:
    """`Routes` in memory: those of one rank's own layers and rows, as its routers chose them.

    Args:
        layers: MoE layers that `values` holds.
        offsets: int64 [S + 1], `SequenceBatch.offsets` of the batch that was routed.
        places: int64 [R], ascending, where on the batch's token axis the token of each row stands.
        values: uint8 or int16 [layers, R, top_k].
    """

    def __init__(self, layers: Sequence[int], offsets: np.ndarray, places: np.ndarray, values: np.ndarray) -> None:
        self._layers = {layer: i for i, layer in enumerate(layers)}
        self._starts, self._places, self._values = offsets[:-1], places, values

    def rows(self, sequence: int, layers: Sequence[int], begin: int, end: int) -> np.ndarray:
        """See `Routes.rows`.

        Raises:
            ValueError: this rank did not route these rows.
        """
        start = int(self._starts[sequence])
        first, last = np.searchsorted(self._places, [start + begin, start + end])
        if last - first != end - begin or any(layer not in self._layers for layer in layers):
            raise ValueError(
                f"rows {begin} to {end} of sequence {sequence} were not routed on this rank: pass log_probs and "
                "train_step the same plan of micro-batches"
            )
        return self._values[[self._layers[layer] for layer in layers], first:last].astype(np.int16)

    def select(self, indices: Iterable[int]) -> ArrayRoutes:
        """See `Routes.select`; nothing is copied."""
        chosen = ArrayRoutes((), np.zeros(1, dtype=np.int64), self._places, self._values)
        chosen._layers, chosen._starts = self._layers, self._starts[np.asarray(list(indices), dtype=np.int64)]
        return chosen


def local_routes(
    routes: Routes, layers: Sequence[int], offsets: np.ndarray, destination: np.ndarray, top_k: int, num_experts: int
) -> np.ndarray:
    """The experts of a micro-batch's rows, int16 [layers, R, top_k], -1 for padding and where `routes` has none.

    Args:
        routes: of the batch.
        layers: MoE layers wanted.
        offsets: int64 [S + 1] of the batch.
        destination: int64 [R], `MicroBatch.destination` of the rows wanted: row r reads the token before it.
        top_k: experts of a token.
        num_experts: routed experts of a layer.

    Raises:
        ValueError: `routes` are not those of this model.
    """
    found = np.full((len(layers), destination.size, top_k), -1, dtype=np.int16)
    for first, last in _runs(destination):
        place = int(destination[first]) - 1
        sequence = int(np.searchsorted(offsets, place, side="right")) - 1
        begin = place - int(offsets[sequence])
        part = routes.rows(sequence, layers, begin, begin + last - first)
        if part.shape != found[:, first:last].shape or (part.size and part.max() >= num_experts):
            raise ValueError(
                f"routes of sequence {sequence} are {list(part.shape)} with experts up to {part.max(initial=-1)}, not "
                f"{list(found[:, first:last].shape)} [MoE layers, tokens, top-k] below {num_experts}: they come from "
                "another model; generate them anew"
            )
        found[:, first:last] = part
    return found


def _runs(destination: np.ndarray) -> list[tuple[int, int]]:
    """Ranges of rows whose tokens follow each other. (The first token of a sequence is nowhere a destination, so no
    range reaches from one sequence into the next.)

    >>> _runs(np.array([1, 2, 3, 5, 6, -1, -1, 9]))
    [(0, 3), (3, 5), (7, 8)]
    """
    cuts = np.flatnonzero(np.diff(destination) != 1) + 1
    bounds = [0, *cuts.tolist(), destination.size]
    return [(a, b) for a, b in itertools.pairwise(bounds) if b > a and destination[a] >= 0]
