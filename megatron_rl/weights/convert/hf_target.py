"""Writes Hugging Face directories: safetensors files with an index, and what stands beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megatron_rl.files import write_atomic
from megatron_rl.weights.buckets import TensorSpec, plan_buckets
from megatron_rl.weights.companions import companions_of, copy_companions
from megatron_rl.weights.convert.one_file import PlannedFile
from megatron_rl.weights.convert.tensors import Rows
from megatron_rl.weights.reader import INDEX, file_name, index_of
from megatron_rl.weights.safetensors_file import header_of

SHARD_BYTES = 5 * 10**9
"""As large as a file may get; transformers' own limit."""


class HfTarget:
    """The files of a Hugging Face directory.

    Args:
        tensors: what is written, in this order.
        beside: directory of the config, tokenizer etc. that are copied.
        shard_bytes: what a file shall not exceed; a larger tensor gets a file of its own.
        dtype: what config.json says afterwards; None = that of most of the numbers.
    """

    def __init__(
        self,
        tensors: Mapping[str, Rows],
        beside: Path,
        shard_bytes: int = SHARD_BYTES,
        dtype: torch.dtype | None = None,
    ) -> None:
        companions_of(beside)  # what is wrong there is said before anything is written
        self._beside = beside
        self._dtype = dtype or largest_part(tensors.values())
        buckets = plan_buckets(([TensorSpec(name, t.shape, t.dtype)] for name, t in tensors.items()), shard_bytes)
        self.files = [
            PlannedFile(file_name(number, len(buckets)), tuple(tensors[spec.name] for spec in bucket.tensors))
            for number, bucket in enumerate(buckets, 1)
        ]

    def writer(self, file: PlannedFile, stream: IO[bytes]) -> _SafetensorsWriter:
        return _SafetensorsWriter(file, stream)

    def finish(self, folder: Path, records: Mapping[str, Any]) -> None:
        where = {tensor.name: file.name for file in self.files for tensor in file.tensors}
        if len(self.files) > 1:
            write_atomic(folder / INDEX, index_of(where, sum(file.size for file in self.files)))
        copy_companions(self._beside, folder, self._dtype, where)


class _SafetensorsWriter:
    def __init__(self, file: PlannedFile, stream: IO[bytes]) -> None:
        self._stream = stream
        stream.write(header_of([(tensor.name, tensor.shape, tensor.dtype) for tensor in file.tensors]))

    def put(self, tensor: Rows, begin: int, data: Tensor) -> None:
        self._stream.write(data.contiguous().view(torch.uint8).numpy().data if data.numel() else b"")

    def record(self) -> None:
        """The index follows from the plan."""


def largest_part(tensors: Iterable[Rows]) -> torch.dtype:
    """The dtype of most of the numbers."""
    counts: dict[torch.dtype, int] = {}
    for tensor in tensors:
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + torch.Size(tensor.shape).numel()
    return max(counts, key=lambda dtype: counts[dtype])
