"""What the trainer needs for an update only, moved to the host and back; when that happens is decided in `colocation`.

Optimizer moments and fp32 main weights are copied to (pinned) host memory. Gradient buffers are given up without a
copy: every update begins by clearing them, so they come back as zeros. The model's own weights stay where they are:
publishing and log-probs work at any time.

Storages move, not tensors. A tensor, the views of it that Megatron holds (buckets, shards, `main_grad`), and the keys
of the optimizer's state stay the same objects, which for a while have no memory behind them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from megatron_rl.policy.optimizer import Optimizer


@dataclass(frozen=True)
class _Moved:
    """A storage that is empty now; `host` holds its bytes, None = zeros."""

    storage: torch.UntypedStorage
    size: int
    device: torch.device
    host: Tensor | None


class TrainingMemory:
    """The training state of this rank: on its device, or on the host. Not collective.

    Args:
        chunks: the wrapped model chunks.
        optimizer: theirs.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], optimizer: Optimizer) -> None:
        self._chunks, self._optimizer = list(chunks), optimizer
        self._moved: list[_Moved] = []
        self._spare: dict[int, list[Tensor]] = defaultdict(list)
        self.on_host = False

    def to_host(self) -> int:
        """Free the device memory of the training state; between updates only. Returns the bytes that were freed."""
        if self.on_host:
            return 0
        self._optimizer.megatron.zero_grad()  # `grad` of main weights: views of the buffers that go
        weights = {_address(tensor) for tensor in self._weights()}
        kept = _storages(self._state(), weights)
        dropped = _storages(self._gradients(), weights)
        copies = [self._copy(storage) for storage in kept]
        _synchronize()  # copies have arrived, and no kernel reads what is freed now
        self._moved = [
            _Moved(storage, storage.nbytes(), storage.device, host)
            for storage, host in zip([*kept, *dropped], [*copies, *[None] * len(dropped)], strict=True)
        ]
        for moved in self._moved:
            moved.storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # else torch keeps it, and no other process can have it
        self.on_host = True
        return sum(moved.size for moved in self._moved)

    def to_device(self) -> None:
        """Bring all of it back, bit by bit."""
        if not self.on_host:
            return
        for moved in self._moved:
            moved.storage.resize_(moved.size)
            target = _bytes_of(moved.storage, moved.device)
            if moved.host is None:
                target.zero_()
            else:
                target.copy_(moved.host, non_blocking=True)
        _synchronize()
        for moved in self._moved:
            if moved.host is not None:
                self._spare[moved.size].append(moved.host)  # pinning memory takes longer than copying to it
        self._moved, self.on_host = [], False

    def _copy(self, storage: torch.UntypedStorage) -> Tensor:
        size = storage.nbytes()
        spare = self._spare[size]
        host = spare.pop() if spare else torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return host.copy_(_bytes_of(storage, storage.device), non_blocking=True)

    def _weights(self) -> Iterator[Tensor]:
        """Tensors whose storages must stay. An fp32 model has no main weights: its optimizer updates these."""
        for chunk in self._chunks:
            yield from chunk.parameters()
            yield from (buffer.param_data for buffer in _buffers(chunk) if buffer.param_data is not None)

    def _gradients(self) -> Iterator[Tensor]:
        for chunk in self._chunks:
            yield from (buffer.grad_data for buffer in _buffers(chunk))

    def _state(self) -> Iterator[Tensor]:
        """Main weights and all tensors of the optimizer's state that are on the policy's device."""
        device = next(self._chunks[0].parameters()).device
        for part in self._optimizer.parts:
            inner = getattr(part, "optimizer", None)
            if inner is None:  # a rank without parameters of this kind
                continue
            tensors = [p for group in inner.param_groups for p in group["params"]]
            tensors += [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
            yield from (tensor for tensor in tensors if tensor.device == device)


def _buffers(chunk: DistributedDataParallel) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _storages(tensors: Iterable[Tensor], but: set[int]) -> list[torch.UntypedStorage]:
    """The storages of `tensors`, each once, without empty ones and without those at the addresses `but`."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if tensor.untyped_storage().nbytes() and _address(tensor) not in but:
            if not tensor.untyped_storage().resizable():  # as a checkpoint's reader leaves it
                tensor.data = tensor.detach().clone()
            found[_address(tensor)] = tensor.untyped_storage()
    return list(found.values())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """uint8 [size of the storage], sharing its memory."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
