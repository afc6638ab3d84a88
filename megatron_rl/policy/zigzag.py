"""Which rows of packed sequences each context-parallel rank has; numpy alone, no process group and no tensors here.

Every sequence, padded to a multiple of 2 CP rows, is cut into 2 CP chunks, and rank r has chunks r and 2 CP - 1 - r.
Under causal attention a chunk's work grows with its place, so that all ranks work equally much. Megatron and
Transformer Engine take this order for granted with packed (thd) sequences: `thd_get_partitioned_indices` is `zigzag`.
"""

from __future__ import annotations

import numpy as np

from megatron_rl.policy.batch import ragged_rows


def zigzag(borders: np.ndarray, size: int, rank: int) -> np.ndarray:
    """int64 [T / size], the rows of rank `rank` among the T packed ones of all `size` ranks, in the order it has them.

    Args:
        borders: int64 [n + 1], first row of every sequence and T; their lengths are multiples of 2 `size`, unless
            `size` is 1.

    >>> zigzag(np.array([0, 4, 12]), 2, 0).tolist(), zigzag(np.array([0, 4, 12]), 2, 1).tolist()
    ([0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9])
    """
    if size == 1:
        return np.arange(borders[-1], dtype=np.int64)
    chunk = np.diff(borders) // (2 * size)
    front, back = borders[:-1] + rank * chunk, borders[:-1] + (2 * size - 1 - rank) * chunk
    return ragged_rows(np.stack([front, back], 1).ravel(), chunk.repeat(2))
