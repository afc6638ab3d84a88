"""The columns of a vocabulary that one tensor-parallel rank holds, and the one collective over them; no arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """Rank r of `size` holds columns r W .. (r + 1) W, of which `valid` belong to the true vocabulary."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    start: int
    """First column of this rank in the whole vocabulary."""
    valid: int

    @classmethod
    def of(cls, width: int, vocab_size: int | None, group: dist.ProcessGroup | None) -> Shard:
        """This rank's shard of W = `width` columns.

        Raises:
            ValueError: `vocab_size` is not 1 .. W times the number of ranks.
        """
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        vocab_size = width * size if vocab_size is None else vocab_size
        if not 0 < vocab_size <= width * size:
            raise ValueError(
                f"vocab_size={vocab_size} does not fit {width * size} columns over all ranks; use 1 .. {width * size}"
            )
        start = rank * width
        return cls(group, rank, size, start, min(width, max(0, vocab_size - start)))

    def gather(self, stats: Tensor) -> Callable[[], Tensor]:
        """Start gathering [4, n] of all ranks; the call that is returned waits and gives [ranks, 4, n].

        Every rank of the group sees the same targets, hence the same n. Until the call, other work can be queued: on
        CUDA the collective runs beside it.
        """
        if self.size == 1 or stats.numel() == 0:
            return lambda: stats.expand(self.size, *stats.shape)
        out = stats.new_empty(self.size * stats.shape[0], stats.shape[1])
        work = dist.all_gather_into_tensor(out, stats, group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return out.view(self.size, *stats.shape)

        return wait
