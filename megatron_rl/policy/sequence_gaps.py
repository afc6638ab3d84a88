"""How far trainer and engine are apart on each sample of a step; sums over tokens are `algorithms.token_statistics`.

For the dump of the step's samples: a mean over a batch does not say which sequences make it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .batch import SequenceBatch
from .step_batch import LocalUpdate

COLUMNS = ("gap_mean_abs", "gap_max_abs", "routing_mismatch")


def sequence_gaps(
    updates: Sequence[LocalUpdate], rows: int, total: Callable[[np.ndarray], np.ndarray]
) -> dict[str, list[float | None]]:
    """By name of COLUMNS, a value for each of the step's `rows` samples: of |old - behaviour| over trainable tokens,
    and `SequenceBatch.routing_mismatch`.

    Args:
        updates: this rank's share of every update of the step, with old and behaviour log-probs.
        rows: samples of the step's table, B.
        total: adds up float64 [5, B] over data-parallel ranks; called once, by all ranks.

    None for a sample that takes no part in the step, or has no trainable token (or no routes): 0 would be perfect
    agreement.

    Raises:
        ValueError: old or behaviour log-probs are not filled in.
    """
    found = np.zeros((5, rows), np.float64)
    for local in updates:
        mine = local.update.samples[local.update.local(local.dp_rank)]
        found[0, mine] = local.batch.trainable_counts > 0
        found[1:3, mine] = batch_gaps(local.batch)
        if local.batch.routing_mismatch is not None:
            found[3, mine] = np.isfinite(local.batch.routing_mismatch)
            found[4, mine] = np.nan_to_num(local.batch.routing_mismatch)
    known, mean, largest, routed, mismatch = total(found)
    columns = ((mean, known), (largest, known), (mismatch, routed))
    return {
        name: [float(value) if is_known else None for value, is_known in zip(values, there, strict=True)]
        for name, (values, there) in zip(COLUMNS, columns, strict=True)
    }


def batch_gaps(batch: SequenceBatch) -> np.ndarray:
    """float64 [2, S], mean and largest |old - behaviour| of each sequence; 0 where nothing is trainable."""
    if batch.old_log_probs is None or batch.behaviour_log_probs is None:
        raise ValueError("the gap of a sequence needs old_log_probs and behaviour_log_probs: fill them in first")
    if not len(batch):
        return np.zeros((2, 0))
    old, behaviour = (np.where(batch.mask, x, 0.0) for x in (batch.old_log_probs, batch.behaviour_log_probs))
    gap = np.abs(old.astype(np.float64) - behaviour)
    starts = batch.offsets[:-1]
    mean = np.add.reduceat(gap, starts) / np.maximum(batch.trainable_counts, 1)
    return np.stack([mean, np.maximum.reduceat(gap, starts)])
