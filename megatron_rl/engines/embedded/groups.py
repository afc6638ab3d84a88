"""Process groups in which the trainer (rank 0) broadcasts weights and engines receive them; CPU, gloo.

What is done with the tensors is not known here. All functions block, for GROUP_TIMEOUT_S at most.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from .weights import WeightsError
from .wire_tensors import Entry, NamedTensors, unflatten

GROUP_TIMEOUT_S = 300.0
"""How long members may be awaited, and a tensor that is announced. SGLang waits for 30 minutes."""


class Groups:
    """The groups that this engine belongs to, by name; callable from any thread.

    A wait ends when the trainer closes its side; leaving a group does not end it.
    """

    def __init__(self, timeout_s: float = GROUP_TIMEOUT_S) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._lock = threading.Lock()
        self._groups: dict[str, dist.ProcessGroupGloo | None] = {}  # None while its members meet

    def join(self, address: str, port: int, rank: int, world_size: int, name: str) -> None:
        """Meet the other members at rank 0's store and connect.

        Raises:
            WeightsError: the name is in use, the rank is not a receiver's, or the members did not come in time.
        """
        if not 0 < rank < world_size:
            raise WeightsError(
                f"rank_offset must be in [1, {world_size}): rank 0 of {world_size} is the trainer, got {rank}"
            )
        with self._lock:
            if not name or name in self._groups:
                raise WeightsError(f"group_name {name!r}: must not be empty, nor the name of a group that exists")
            self._groups[name] = None
        try:
            group = _connect(address, port, rank, world_size, name, self._timeout)
        except (RuntimeError, ValueError, OSError) as error:
            with self._lock:
                del self._groups[name]
            raise WeightsError(f"Failed to initialize custom process group: {error}") from error
        with self._lock:
            self._groups[name] = group

    def leave(self, name: str) -> None:
        """Forget a group, which closes its connections. Raises WeightsError when there is none."""
        with self._lock:
            if self._groups.get(name) is None:
                raise WeightsError(f"The group to be destroyed does not exist: {name!r}")
            del self._groups[name]

    def receive(self, name: str, entries: Sequence[Entry]) -> NamedTensors:
        """Take part in a broadcast of rank 0, of the bytes of all tensors together.

        Raises:
            WeightsError: no such group, or nothing came in time; the group is of no further use.
        """
        group = self._groups.get(name)
        if group is None:
            raise WeightsError(
                f"group {name!r} is not among {sorted(self._groups)}; call /init_weights_update_group first"
            )
        buffer = torch.empty(entries[-1].end_idx, dtype=torch.uint8)
        tensors = unflatten(buffer, entries)  # refused before anything is awaited
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            group.broadcast([buffer], options).wait()  # type: ignore[attr-defined]  # missing in the stubs
        except RuntimeError as error:
            span = entries[0].name if len(entries) == 1 else f"{entries[0].name} to {entries[-1].name}"
            raise WeightsError(f"Failed to receive weights: {span} from group {name!r}: {error}") from error
        return tensors


def _connect(
    address: str, port: int, rank: int, world_size: int, name: str, timeout: timedelta
) -> dist.ProcessGroupGloo:
    """The keys of SGLang's groups: its own prefix, then the two that torch puts before a group's and a device's."""
    host = f"[{address}]" if ":" in address else address
    store, _, _ = next(iter(rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=timeout)))
    store.set_timeout(timeout)
    prefixed = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    return dist.ProcessGroupGloo(prefixed, rank, world_size, timeout)
