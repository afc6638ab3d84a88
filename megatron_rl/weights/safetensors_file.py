"""The safetensors format, one file: its header, and rows read from it without mapping the file; no names' meaning here.

    8 bytes   length of the header, little endian
    header    JSON: {"name": {"dtype": "BF16", "shape": [..], "data_offsets": [begin, end]}, .., "__metadata__": {..}}
    data      tensors in C order, little endian; offsets count from here

Files are read with `pread` into memory of our own: a mapped file counts as the process's memory page by page, and a
file that is cut short behind our back kills the process that has mapped it.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.files import json_object
from megatron_rl.weights import WeightsError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What weights may be made of."""
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
READ_AHEAD = 16 * 2**20
"""Bytes that the kernel is asked to fetch beyond a read, meanwhile. Small reads ask once for many of them."""
_LENGTH_BYTES = 8
_MAX_HEADER = 100 * 2**20
"""As the reference implementation: a longer one is not a header but a damaged file."""


@dataclass(frozen=True)
class TensorOnDisk:
    """One tensor of a file; reads only the rows or columns that are asked for."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    offset: int
    """Of the first byte, in the file."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows `begin` to `end` of the first dimension, in the file's dtype.

        Raises:
            WeightsError: the file ends before them.
        """
        row = math.prod(self.shape[1:])
        return read_elements(self.file, self.offset, begin * row, (end - begin) * row, self.dtype).reshape(
            end - begin, *self.shape[1:]
        )

    def columns(self, begin: int, end: int) -> Tensor:
        """Columns `begin` to `end` of the second dimension, in the file's dtype; other bytes are passed over."""
        part = torch.empty(self.shape[0], end - begin, dtype=self.dtype)
        step = max(1, _COLUMN_BLOCK // max(1, self.shape[1] * self.dtype.itemsize))
        for first in range(0, self.shape[0], step):
            last = min(first + step, self.shape[0])
            part[first:last] = self.rows(first, last)[:, begin:end]
        return part


_COLUMN_BLOCK = 32 * 2**20
"""Bytes read at a time for columns: in one sweep, which is faster on every file system than a seek for each row."""


class _Ahead:
    """What the kernel was asked for last: asking costs as much as a small read, where the pages are there as well."""

    def __init__(self) -> None:
        self._asked: tuple[Path | None, int, int] = (None, 0, 0)

    def ask(self, file: Path, descriptor: int, position: int) -> None:
        """What comes next in the file is mostly what is asked for next."""
        known, begin, end = self._asked
        if file == known and begin <= position and position + READ_AHEAD // 2 <= end:
            return
        os.posix_fadvise(descriptor, position, READ_AHEAD, os.POSIX_FADV_WILLNEED)
        self._asked = (file, position, position + READ_AHEAD)


_ahead = _Ahead()


def read_elements(
    file: Path, offset: int, first: int, count: int, dtype: torch.dtype, more_follows: bool = True
) -> Tensor:
    """`count` elements from number `first` on of the array that begins at byte `offset`: [count] of `dtype`.

    Args:
        more_follows: what comes next in the file is wanted soon.

    Raises:
        WeightsError: the file is gone, or ends before them.
    """
    part = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
    view, position = part.numpy().data, offset + first * dtype.itemsize
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read ({error.strerror}); it was there a moment ago") from error
    try:
        while view:
            got = os.preadv(descriptor, [view], position)
            if got == 0:
                raise WeightsError(f"{file}: ends at byte {position}, in the middle of a tensor; copy the file again")
            view, position = view[got:], position + got
        if more_follows:
            _ahead.ask(file, descriptor, position)
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read at byte {position} ({error.strerror})") from error
    finally:
        os.close(descriptor)
    return part.view(dtype)


def read_header(file: Path) -> dict[str, TensorOnDisk]:
    """Every tensor of a file, by name, after a look at the header alone.

    Raises:
        WeightsError: not a safetensors file, cut short, with a tensor twice, with a dtype or shape that do not fit the
            bytes, or with bytes that belong to no tensor, or to two.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or not 2 <= length <= min(_MAX_HEADER, size - _LENGTH_BYTES):
            raise WeightsError(
                f"{file}: unreadable or cut short ({size} bytes, its header would take {length}); copy the file again"
            )
        header = _parse(file, stream.read(length))
    header.pop("__metadata__", None)
    start = _LENGTH_BYTES + length
    found = {name: _tensor(file, name, facts, start) for name, facts in header.items()}
    end = start
    for tensor in sorted(found.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != end:
            raise WeightsError(
                f"{file}: {tensor.name!r} begins at byte {tensor.offset}, and what is before it ends at {end}; the "
                "file was written wrongly, get it again"
            )
        end += tensor.nbytes
    if end != size:
        state = "cut short" if size < end else "longer than its header says"
        raise WeightsError(f"{file}: {state} ({size} bytes instead of {end}); copy the file again")
    return found


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            name = next(name for name in entries if sum(name == other for other, _ in pairs) > 1)
            raise WeightsError(f"{file}: the tensor {name!r} is there twice; get the file again, from its source")
        return entries

    try:
        return json_object(text, unique)
    except ValueError as error:
        raise WeightsError(f"{file}: unreadable, its header is damaged ({error}); copy the file again") from error


def _tensor(file: Path, name: str, facts: Any, start: int) -> TensorOnDisk:
    match facts:
        case {"dtype": str(code), "shape": [*sizes], "data_offsets": [begin, end]} if all(
            type(number) is int and number >= 0 for number in (*sizes, begin, end)
        ):
            shape = tuple(sizes)
        case _:
            raise WeightsError(f"{file}: the header's entry of {name!r} is damaged; copy the file again")
    if code not in DTYPES:
        raise WeightsError(
            f"{file}: {name!r} has dtype {code}, which cannot be read; convert the file to one of {', '.join(DTYPES)}"
        )
    tensor = TensorOnDisk(name, shape, DTYPES[code], file, start + begin)
    if end - begin != tensor.nbytes:
        raise WeightsError(
            f"{file}: {name!r} of shape {list(shape)} and dtype {code} has {end - begin} bytes instead of "
            f"{tensor.nbytes}; the file was written wrongly, get it again"
        )
    return tensor


def header_of(tensors: list[tuple[str, tuple[int, ...], torch.dtype]]) -> bytes:
    """The length and header of a file that holds these tensors in this order; its data begins at a multiple of 64."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, dtype in tensors:
        size = math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % 64)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text
