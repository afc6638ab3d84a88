"""How far trainer and engine are apart on each sample of a step; sums over tokens are `algorithms.token_statistics`.

For the dump of the step's samples: a mean over a batch does not say which sequences make it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .batch import SequenceBatch
from .step_batch import LocalUpdate

COLUMNS = ("gap_mean_abs", "gap_max_abs")


def sequence_gaps(
    updates: Sequence[LocalUpdate], rows: int, total: Callable[[np.ndarray], np.ndarray]
) -> dict[str, list[float | None]]:
    """By name of COLUMNS, a value for each of the step's `rows` samples: |old - behaviour| over its trainable tokens.

    Args:
        updates: this rank's share of every update of the step, with old and behaviour log-probs.
        rows: samples of the step's table, B.
        total: adds up float64 [3, B] over data-parallel ranks; called once, by all ranks.

    None for a sample that takes no part in the step, or has no trainable token: 0 would be perfect agreement.

    Raises:
        ValueError: old or behaviour log-probs are not filled in.
    """
    found = np.zeros((3, rows), np.float64)
    for local in updates:
        mine = local.update.samples[local.update.local(local.dp_rank)]
        found[0, mine] = local.batch.trainable_counts > 0
        found[1:, mine] = batch_gaps(local.batch)
    known, mean, largest = total(found)
    return {
        name: [float(value) if is_known else None for value, is_known in zip(values, known, strict=True)]
        for name, values in zip(COLUMNS, (mean, largest), strict=True)
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
