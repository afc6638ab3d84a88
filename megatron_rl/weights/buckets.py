"""Buckets: which tensors travel together, where each lies in one flat buffer, and such a buffer as a file.

What the tensors are and how they get into the buffer is in `export`; who sends buckets where, in `transports`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.files import sync
from megatron_rl.weights.safetensors_file import header_of


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, shape and dtype, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Tensors that lie one after the other, without gaps, in the first `nbytes` bytes of a flat uint8 buffer."""

    tensors: tuple[TensorSpec, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First byte and end of each tensor."""
        return list(pairwise(accumulate((tensor.nbytes for tensor in self.tensors), initial=0)))

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each tensor by name, as a view of the buffer."""
        return {
            tensor.name: flat[begin:end].view(tensor.dtype).view(tensor.shape)
            for tensor, (begin, end) in zip(self.tensors, self.bounds, strict=True)
        }


def plan_buckets(groups: Iterable[Sequence[TensorSpec]], capacity: int) -> list[Bucket]:
    """Put groups of tensors into buckets, in their order; a group stays together.

    Within a bucket tensors of larger numbers come first: without gaps, each then begins at a multiple of its numbers'
    size, which views and engines ask for.

    Args:
        groups: tensors that come into being at once, such as the three that one fused matrix is made of.
        capacity: bytes that a bucket shall not exceed; a group that is larger gets a bucket of its own.
    """
    buckets: list[list[TensorSpec]] = []
    used = capacity
    for group in groups:
        size = sum(tensor.nbytes for tensor in group)
        if not buckets or used + size > capacity:
            buckets.append([])
            used = 0
        buckets[-1] += group
        used += size
    return [Bucket(tuple(sorted(bucket, key=lambda tensor: -tensor.dtype.itemsize))) for bucket in buckets]


def write_safetensors(file: Path, bucket: Bucket, flat: Tensor) -> None:
    """Write a bucket as a safetensors file, durably.

    The buffer goes to the file as it lies in memory: the library's own function would first copy all of it.

    Args:
        flat: uint8 on the CPU, of at least `bucket.nbytes` bytes.

    Raises:
        OSError: as the file system does.
    """
    with file.open("wb") as stream:
        stream.write(header_of([(tensor.name, tensor.shape, tensor.dtype) for tensor in bucket.tensors]))
        stream.write(flat[: bucket.nbytes].numpy().data)
    sync(file)
