"""What one rank has and others need: bytes for a model replica, outcomes of calls, dicts; no HTTP and no files here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.policy.distributed import device

K = TypeVar("K")
V = TypeVar("V")


def broadcast_to_replica(data: bytes | None) -> bytes:
    """Give `data` of the data-parallel leader to all ranks of its model replica. Collective over them.

    Args:
        data: the bytes on the leader (`distributed.is_data_parallel_leader`); ignored on the others.
    """
    from megatron.core import parallel_state

    # Megatron has no group of a whole replica. The leader is the first rank of both groups that it is in.
    model, context = parallel_state.get_model_parallel_group(), parallel_state.get_context_parallel_group()
    if model.rank() == 0:
        data = _broadcast(data, context)
    return _broadcast(data, model)


def _broadcast(data: bytes | None, group: dist.ProcessGroup) -> bytes:
    """`data` of the group's first rank, on all of its ranks."""
    data = data or b""
    if group.size() == 1:
        return data
    source = dist.get_process_group_ranks(group)[0]
    size = torch.tensor([len(data)], dtype=torch.int64, device=device())
    dist.broadcast(size, src=source, group=group)
    if group.rank() == 0 and data:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device())
    else:
        buffer = torch.empty(int(size), dtype=torch.uint8, device=device())
    if buffer.numel():
        dist.broadcast(buffer, src=source, group=group)
    return buffer.cpu().numpy().tobytes()


def sum_over_data_parallel(values: np.ndarray) -> np.ndarray:
    """float64 `values` of any shape, added up over data-parallel ranks. Collective over them.

    Context-parallel ranks of one replica pass the same, since each knows its sequences as a whole.
    """
    from megatron.core import parallel_state

    tensor = torch.from_numpy(values.astype(np.float64)).to(device())
    dist.all_reduce(tensor, group=parallel_state.get_data_parallel_group())
    return tensor.cpu().numpy()


def on_rank_zero(call: Callable[[], object], error: type[Exception]) -> None:
    """Run `call` on rank 0 while the others wait; else as `on_every_rank`."""
    on_every_rank(call if dist.get_rank() == 0 else lambda: None, error)


def on_every_rank(call: Callable[[], object], error: type[Exception]) -> None:
    """Run `call` on all ranks, each its own share. Collective.

    Raises:
        error: on every rank, with the message of the first rank whose call fails: none goes on or waits alone.
    """
    mine: dict[int, str] = {}
    cause: Exception | None = None
    try:
        call()
    except Exception as caught:
        cause = caught
        mine[dist.get_rank()] = str(caught) if isinstance(caught, error) else f"{type(caught).__name__}: {caught}"
    failures = merge_of_all_ranks(mine)
    if failures:
        raise error(failures[min(failures)]) from cause


def merge_of_all_ranks(part: dict[K, V]) -> dict[K, V]:
    """All ranks' dicts as one, on every rank; keys do not repeat, keys and values can be pickled. Collective."""
    gathered: list[dict[K, V]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, part)
    return {key: value for found in gathered for key, value in found.items()}
