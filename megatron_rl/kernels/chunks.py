"""Where the live rows of a batch are cut into chunks, so that logits exist of one chunk at a time; nothing is computed.

A chunk is a list of pieces, ranges of positions among the live rows. It has several only when it is one sequence that
is longer than a chunk may be: the loss must then see all of it before the first gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

Piece = tuple[int, int]


def cut(live: Tensor, num_rows: int, chunk: int, starts: Sequence[int] | None, equal: bool) -> list[list[Piece]]:
    """Pieces `(first, end)` of every chunk, in order.

    Args:
        live: int64 [n], ascending numbers of the live rows among `num_rows`.
        chunk: most live rows of a piece.
        starts: first row of every sequence, ascending from 0, when a loss needs whole sequences; else None.
        equal: choose borders by rows instead of by live rows, and keep chunks without any live row. Ranks that hold
            parts of the same sequences, equally long but differently masked, then have the same number of chunks.

    >>> cut(torch.tensor([1, 2, 3, 6, 7]), 8, 2, None, False)
    [[(0, 2)], [(2, 4)], [(4, 5)]]
    >>> cut(torch.tensor([1, 2, 3, 6, 7]), 8, 2, [0, 4], False)
    [[(0, 2), (2, 3)], [(3, 5)]]
    """
    n = live.shape[0]
    if starts is None:
        return [[piece] for piece in _even(0, n, chunk)]
    edges = [*starts, num_rows]
    positions = torch.searchsorted(live, torch.tensor(edges, device=live.device)).tolist()
    sizes = edges if equal else positions
    chunks, first = [], 0
    for i in range(1, len(edges)):
        last = i == len(edges) - 1
        if last or sizes[i + 1] - sizes[first] > chunk:
            if equal or positions[i] > positions[first]:
                chunks.append(_pieces(positions[first], positions[i], chunk))
            first = i
    return chunks


def _pieces(first: int, end: int, chunk: int) -> list[Piece]:
    return _even(first, end, chunk) or [(first, end)]


def _even(first: int, end: int, chunk: int) -> list[Piece]:
    """As few ranges of at most `chunk` as there can be, of equal size but for one."""
    count = math.ceil((end - first) / chunk)
    bounds = [first + (end - first) * i // count for i in range(count)] + [end]
    return list(itertools.pairwise(bounds)) if count else []
