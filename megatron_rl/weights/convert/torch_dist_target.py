"""Writes Megatron's `torch_dist` checkpoints; how they look on disk is said in `torch_dist`.

The format knows no layout: every reader cuts what it needs out of the chunks there are. The layout that is asked for
decides only how chunks are cut (a rank of that layout reads whole ones), which of them share a file (those of a
pipeline stage, and of its experts those of one expert-parallel rank), and how many rows the vocabulary is padded to.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_rl.files import write_atomic
from megatron_rl.weights.companions import companions_of, copy_companions
from megatron_rl.weights.convert.one_file import PlannedFile
from megatron_rl.weights.convert.tensors import Part, Rows, size_of
from megatron_rl.weights.convert.torch_dist import COMMON, FORMAT, HF, METADATA, TRACKER

FILE_BYTES = 5 * 10**9
_OBJECTS = "__0_objects.distcp"


@dataclass(frozen=True)
class Cut:
    """Where a tensor is cut: into equal parts of rows and of columns; and whose it is.

    Attributes:
        owner: the pipeline stage, and in it the expert-parallel rank (-1: all of them). Files are one owner's.
    """

    rows: int
    columns: int
    owner: tuple[int, int]


@dataclass(frozen=True)
class Slab:
    """Some rows of the matrix or vector at `index` of the tensor `key`."""

    key: str
    index: tuple[int, ...]
    of: Rows
    begin: int
    end: int
    columns: int

    @property
    def name(self) -> str:
        return self.key + "".join(f"[{i}]" for i in self.index) + (f" from {self.begin}" if self.begin else "")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.end - self.begin, *self.of.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def rows(self, begin: int, end: int) -> Tensor:
        return self.of.rows(self.begin + begin, self.begin + end)

    def needs(self, begin: int, end: int) -> Iterator[Part]:
        """Of the whole."""
        yield Part(self.of, self.begin + begin, self.begin + end)


@dataclass(frozen=True)
class Whole:
    """A tensor that is to be written: its global shape, its matrices or vectors by their index, and their cuts."""

    shape: tuple[int, ...]
    planes: Mapping[tuple[int, ...], Rows]
    cuts: Mapping[tuple[int, ...], Cut]

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.planes.values())).dtype

    def slabs(self, key: str) -> Iterator[tuple[tuple[int, int], Slab]]:
        """With the owner of each."""
        for index, plane in self.planes.items():
            cut = self.cuts[index]
            count = plane.shape[0]
            bounds = [count * part // cut.rows for part in range(cut.rows + 1)]
            for begin, end in pairwise(bounds):
                yield cut.owner, Slab(key, index, plane, begin, end, cut.columns)


class TorchDistTarget:
    """The files of a checkpoint, none much larger than `FILE_BYTES`.

    Args:
        tensors: by name.
        common: what is not sharded, for `common.pt`: an object that `torch.save` can write, or the file's bytes.
        objects: sharded objects by name: what `torch.save` wrote of each.
        folder: where, below the target's directory; empty = there.
        hf: Hugging Face directory whose config and tokenizer are copied to `hf/`.
        tracker: content of the file in which Megatron-LM's `--load` finds the name of `folder`.
    """

    def __init__(
        self,
        tensors: Mapping[str, Whole],
        common: Any,
        objects: Mapping[str, bytes],
        *,
        folder: str = "",
        hf: Path | None = None,
        tracker: str | None = None,
    ) -> None:
        self._tensors, self._common, self._objects, self._folder, self._hf = tensors, common, objects, folder, hf
        self._tracker = tracker
        if hf is not None:
            companions_of(hf)  # what is wrong there is said before anything is written
        slabs = [pair for key, whole in tensors.items() for pair in whole.slabs(key)]
        slabs.sort(key=lambda pair: pair[0])  # by owner; stable
        groups: list[list[Slab]] = []
        last, used = None, 0
        for owner, slab in slabs:
            if owner != last or used + size_of(slab) > FILE_BYTES:
                groups.append([])
                last, used = owner, 0
            groups[-1].append(slab)
            used += size_of(slab)
        self.files = [PlannedFile(f"{folder}__{i}_0.distcp", tuple(group)) for i, group in enumerate(groups)]

    def writer(self, file: PlannedFile, stream: IO[bytes]) -> _ChunkWriter:
        return _ChunkWriter(stream)

    def finish(self, folder: Path, records: Mapping[str, Any]) -> None:
        self._finish_tensors(folder / self._folder, records)
        if self._tracker is not None:
            write_atomic(folder / TRACKER, self._tracker)
        if self._hf is not None:
            copy_companions(self._hf, folder / HF)

    def _finish_tensors(self, folder: Path, records: Mapping[str, Any]) -> None:
        places: dict[MetadataIndex, _StorageInfo] = {}
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        for file, entries in records.items():
            for key, offsets, sizes, offset, length in entries:
                places[MetadataIndex(key, torch.Size(offsets))] = _StorageInfo(
                    file.removeprefix(self._folder), offset, length
                )
                chunks.setdefault(key, []).append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        described: dict[str, Any] = {
            key: TensorStorageMetadata(TensorProperties(dtype=whole.dtype), torch.Size(whole.shape), chunks[key])
            for key, whole in self._tensors.items()
        }
        position = 0
        for key, content in self._objects.items():
            described[key] = BytesStorageMetadata()
            places[MetadataIndex(key)] = _StorageInfo(_OBJECTS, position, len(content))
            position += len(content)
        if self._objects:
            write_atomic(folder / _OBJECTS, b"".join(self._objects.values()))
        write_atomic(folder / METADATA, _pickled(Metadata(described, None, places)))
        write_atomic(folder / COMMON, self._common if isinstance(self._common, bytes) else saved(self._common))
        write_atomic(
            folder / FORMAT,
            '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, '
            '"common_backend": "torch", "common_backend_version": 1}',
        )


def _pickled(value: Any) -> bytes:
    """Without the memo, by which bytes would depend on which equal strings happen to be one object."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.fast = True
    pickler.dump(value)
    return stream.getvalue()


def saved(value: Any) -> bytes:
    """What `torch.save` makes of it."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class _ChunkWriter:
    """One `torch.save` archive for each block and each part of its columns."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._entries: list[list[Any]] = []

    def put(self, tensor: Rows, begin: int, data: Tensor) -> None:
        assert isinstance(tensor, Slab)
        lead = [1] * len(tensor.index)
        first = tensor.begin + begin
        parts: Sequence[Tensor] = data.chunk(tensor.columns, dim=1) if tensor.columns > 1 else [data]
        left = 0
        for part in parts:
            offsets = [*tensor.index, first, *([left] if part.dim() > 1 else [])]
            sizes = [*lead, *part.shape]
            offset = self._stream.tell()
            torch.save(part.contiguous().clone().view(sizes) if part is not data else part.view(sizes), self._stream)
            self._entries.append([tensor.key, offsets, sizes, offset, self._stream.tell() - offset])
            left += part.shape[-1]

    def record(self) -> list[list[Any]]:
        return self._entries
