"""Reads the two kinds of pickles in a `torch_dist` checkpoint without trusting them: metadata, and a tensor's header.

A pickle names functions that are to be called. These readers look every name up in a list of their own, which holds
plain records and nothing else; any other name ends the reading.
"""

from __future__ import annotations

import collections
import io
import math
import pathlib
import pickle
import struct
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from megatron_rl.files import regular


class UnknownName(Exception):
    """A pickle wants something that such a file does not need."""


_RECORDS: dict[tuple[str, str], Any] = {
    (module.__name__, name): getattr(module, name)
    for module, names in (
        (
            metadata,
            (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "MetadataIndex",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            ),
        ),
        (filesystem, ("_StorageInfo", "_StorageWriterTransforms")),
        (pathlib, ("PosixPath", "PurePosixPath")),
        (collections, ("OrderedDict",)),
        (torch, ("Size",)),
    )
    for name in names
    if hasattr(module, name)
}
_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


def read_metadata(file: Path) -> Any:
    """The `Metadata` of a checkpoint. Raises UnknownName for a file that wants more, and what pickle raises."""
    with open(regular(file), "rb") as stream:
        return _MetadataReader(stream).load()


class _MetadataReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return _RECORDS[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        raise UnknownName(f"it names {module}.{name}, which no checkpoint's metadata needs")


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise UnknownName(f"it names a layout {name!r}")
    return found


@dataclass(frozen=True)
class ArrayOnDisk:
    """The numbers of a saved tensor, in C order: `offset` is their first byte, from the archive's beginning.

    `checksum` is their CRC-32; None where the archive has none, or only one of more than they.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    checksum: int | None

    @property
    def nbytes(self) -> int:
        """Of all numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    key: str


@dataclass(frozen=True)
class _Saved:
    storage: _Storage
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _TensorReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, first, shape, strides, *_: _Saved(storage, first, tuple(shape), tuple(strides))
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        raise UnknownName(f"it names {module}.{name}, which no plain tensor needs")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise UnknownName(f"it refers to {pid!r}")
        return _Storage(dtype, str(key))


def read_array(archive: zipfile.ZipFile) -> ArrayOnDisk:
    """Where the numbers of the one tensor in a `torch.save` archive lie.

    Raises:
        UnknownName: the archive holds something else than a tensor, or one that is not stored in C order, uncompressed.
        zipfile.BadZipFile, pickle.UnpicklingError, KeyError: it is damaged.
    """
    for entry in archive.infolist():
        if entry.CRC == 0:  # as `torch.serialization.set_crc32_options(False)` leaves it; None is not compared
            entry.CRC = None  # type: ignore[assignment]
    root = archive.namelist()[0].partition("/")[0]
    if f"{root}/byteorder" in archive.namelist() and archive.read(f"{root}/byteorder") != b"little":
        raise UnknownName("it was written on a machine of the other byte order")
    saved = _TensorReader(io.BytesIO(archive.read(f"{root}/data.pkl"))).load()
    if not isinstance(saved, _Saved):
        raise UnknownName("it holds something else than a tensor")
    record = archive.getinfo(f"{root}/data/{saved.storage.key}")
    if record.compress_type != zipfile.ZIP_STORED or not _is_c_order(saved):
        raise UnknownName("its numbers are compressed or transposed")
    assert archive.fp is not None
    archive.fp.seek(record.header_offset)
    # The fixed part of a local header has 30 bytes; the last four are the lengths of the two texts that follow.
    texts = struct.unpack("<26xHH", archive.fp.read(30))
    begin = record.header_offset + 30 + sum(texts) + saved.first * saved.storage.dtype.itemsize
    array = ArrayOnDisk(saved.shape, saved.storage.dtype, begin, record.CRC)
    return array if array.nbytes == record.file_size else replace(array, checksum=None)


def _is_c_order(saved: _Saved) -> bool:
    expected = 1
    for size, stride in zip(reversed(saved.shape), reversed(saved.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
