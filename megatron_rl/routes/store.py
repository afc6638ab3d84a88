"""Rows of routes in files: appended answer by answer, read by layer and token. Whose rows they are is not known here.

    RUN/routes/PACK.WRITER.94x8x128.u1     one answer after the other: its sums, then its rows [layers, rows, top_k]

Layers lie outermost, so that what a pipeline stage needs of an answer is one piece. The sums are CRC-32, uint32
[layers, rows / 512 rounded up], each of 512 rows of a layer: whoever reads a row reads all that share its sum, and
verifies them. A file has one writer for ever: its name holds the writer's own random word. A reference exists only when
its bytes are in the file and the file was closed, so a writer that is killed leaves at most bytes that nothing refers
to, at the end of a file that nobody goes on with.
"""

from __future__ import annotations

import os
import secrets
import threading
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_rl.files import regular, sync

Rows = NDArray[Any]
"""Expert ids [rows, layers, top_k] or [layers, rows, top_k], of any integer type."""
SUMMED = 512
"""Rows of a layer that share a sum."""
_SUM = np.dtype(np.uint32)
NO_ROUTE = -1
"""Stands where nobody knows which experts a token was routed to."""


class RoutesError(RuntimeError):
    """Rows cannot be read back. The message names the file, and what to do."""


class RoutePart(NamedTuple):
    """Rows of one answer: of the tokens [first, first + rows) of a sequence, prompt and response counted together.

    Row i is the routing while token i was read, so that the last token of a sequence has none. `file` is a name in the
    store's folder, `offset` the byte there at which the answer begins.
    """

    file: str
    offset: int
    first: int
    rows: int

    @property
    def end(self) -> int:
        """The first token after it."""
        return self.first + self.rows


class RouteStore:
    """One folder of routes of one model.

    Args:
        folder: shared by whoever writes and reads; made by the first to write.
        num_layers: MoE layers, in order; layers with an ordinary MLP do not count.
        top_k: experts of a token.
        num_experts: of a layer; up to 256 a row takes one byte per expert, else two.
    """

    def __init__(self, folder: str | Path, num_layers: int, top_k: int, num_experts: int) -> None:
        self.folder = Path(folder)
        self.num_layers, self.top_k, self.num_experts = num_layers, top_k, num_experts
        self.dtype = id_dtype(num_experts)
        self._writer, self._turn = secrets.token_hex(4), threading.Lock()
        self._suffix = f".{num_layers}x{top_k}x{num_experts}.{self.dtype.kind}{self.dtype.itemsize}"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one row over all layers."""
        return self.num_layers * self.top_k * self.dtype.itemsize

    def size(self, part: RoutePart) -> int:
        """Bytes of a part in its file."""
        return self._size_of_sums(part) + part.rows * self.bytes_per_token

    def append(self, routes: Rows, first: int, pack: str = "pack") -> RoutePart:
        """Write routes [rows, layers, top_k] of the tokens from `first` on into this writer's file of `pack`.

        What belongs to one pack is removed together. Threads take turns. Whoever decodes an answer checks its ids.

        Raises:
            ValueError: the shape is not this store's.
            OSError: of the file system.
        """
        if routes.ndim != 3 or routes.shape[1:] != (self.num_layers, self.top_k):
            raise ValueError(f"routes have shape {routes.shape}; [rows, {self.num_layers}, {self.top_k}] is wanted")
        name = f"{pack}.{self._writer}{self._suffix}"
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = np.ascontiguousarray(routes.swapaxes(0, 1), self.dtype)
        with self._turn, open(self.folder / name, "ab", buffering=0) as file:
            offset = file.seek(0, os.SEEK_END)
            for array in (_sums(rows), rows):
                rest = array.ravel().view(np.uint8).data
                while rest:
                    rest = rest[file.write(rest) :]
        return RoutePart(name, offset, first, len(routes))

    def read(self, parts: Sequence[RoutePart], layers: Sequence[int], begin: int, end: int) -> NDArray[np.int16]:
        """Rows of the tokens [begin, end) in `layers` (0 = the first MoE layer), int16 [layers, end - begin, top_k].

        -1 where no part covers a token. No more of a file is read than these layers, and where little is wanted of an
        answer, these tokens and those that share their sums.

        Raises:
            RoutesError: a file is gone, no file, too short, of another model, or was changed after it had been written.
        """
        wanted = np.asarray(layers, np.int64)
        found = np.full((len(wanted), end - begin, self.top_k), NO_ROUTE, np.int16)
        if not wanted.size:
            return found
        for part in parts:
            low, high = max(begin, part.first), min(end, part.end)
            if low < high:
                found[:, low - begin : high - begin] = self._read(part, wanted, low - part.first, high - part.first)
        return found

    def _read(self, part: RoutePart, layers: NDArray[np.int64], low: int, high: int) -> Rows:
        """Rows low to high of a part, [layers, high - low, top_k]: in one piece unless that is mostly unwanted."""
        if not part.file.endswith(self._suffix):
            raise RoutesError(
                f"{self.folder / part.file}: routes of another model; this one has {self._suffix[1:-3]} (MoE layers x "
                "top-k x experts); start the run anew, or resume it with the model that it had"
            )
        begin, end = low - low % SUMMED, min(part.rows, high + -high % SUMMED)
        first, count = int(layers.min()), int(layers.max()) - int(layers.min()) + 1
        try:
            with open(regular(self.folder / part.file), "rb", buffering=0) as file:
                sums = np.frombuffer(self._piece(file.fileno(), part, 0, self._size_of_sums(part)), _SUM)
                if 2 * (end - begin) * len(layers) >= part.rows * count:
                    piece = self._rows(file.fileno(), part, first * part.rows, count * part.rows)
                    whole = piece.reshape(count, part.rows, self.top_k)
                    rows = np.stack([whole[layer - first, begin:end] for layer in layers])
                else:
                    starts = [int(layer) * part.rows + begin for layer in layers]
                    rows = np.stack([self._rows(file.fileno(), part, start, end - begin) for start in starts])
        except OSError as error:
            raise RoutesError(
                f"routes of experts cannot be read: {error}; are all nodes on the file system of the run directory?"
            ) from error
        if (_sums(rows) != sums.reshape(self.num_layers, -1)[layers, begin // SUMMED : -(-end // SUMMED)]).any():
            raise RoutesError(
                f"{self.folder / part.file}: the {part.rows} rows at byte {part.offset} are not those that were "
                "written: their checksum is another one; delete the file and resume the run, which then generates "
                "these routes anew or does without them"
            )
        return rows[:, low - begin : high - begin]

    def _size_of_sums(self, part: RoutePart) -> int:
        return self.num_layers * -(-part.rows // SUMMED) * _SUM.itemsize

    def _rows(self, descriptor: int, part: RoutePart, start: int, count: int) -> Rows:
        """[count, top_k] of a part, all layers counted through."""
        row = self.top_k * self.dtype.itemsize
        blob = self._piece(descriptor, part, self._size_of_sums(part) + start * row, count * row)
        return np.frombuffer(blob, self.dtype).reshape(count, self.top_k)

    def _piece(self, descriptor: int, part: RoutePart, start: int, size: int) -> bytes:
        blob = b""
        while len(blob) < size:
            more = os.pread(descriptor, size - len(blob), part.offset + start + len(blob))
            if not more:
                raise RoutesError(
                    f"{self.folder / part.file}: ends before the {part.rows} rows at byte {part.offset}; the file was "
                    "cut off after it had been written; resume from an earlier checkpoint"
                )
            blob += more
        return blob

    def sync(self, files: Sequence[str]) -> None:
        """Make these files durable. Raises OSError."""
        for name in files:
            sync(self.folder / name)
        if files:
            sync(self.folder)


class StoredRoutes:
    """Routes of the sequences of one batch, read when they are asked for; `parts[i]` are those of sequence i."""

    def __init__(self, store: RouteStore, parts: Sequence[Sequence[RoutePart]]) -> None:
        self._store, self._parts = store, parts

    def __len__(self) -> int:
        """Sequences."""
        return len(self._parts)

    def rows(self, sequence: int, layers: Sequence[int], begin: int, end: int) -> NDArray[np.int16]:
        """Tokens [begin, end) of a sequence, int16 [layers, end - begin, top_k]; see `RouteStore.read`."""
        return self._store.read(self._parts[sequence], layers, begin, end)

    def select(self, indices: Iterable[int]) -> StoredRoutes:
        """The sequences at `indices`, in that order."""
        return StoredRoutes(self._store, [self._parts[i] for i in indices])


def id_dtype(num_experts: int) -> np.dtype[Any]:
    """The smallest type for the ids of a layer's experts: one byte holds 256."""
    return np.dtype(np.uint8 if num_experts <= 256 else np.int16)


def _sums(rows: Rows) -> NDArray[np.uint32]:
    """Of rows [layers, rows, top_k], whose first begins a sum: [layers, sums]."""
    starts = range(0, rows.shape[1], SUMMED)
    return np.array([[zlib.crc32(layer[start : start + SUMMED]) for start in starts] for layer in rows], _SUM)


def holds_doubled(rows: Rows) -> bool:
    """Whether any row [..., top_k] names an expert twice.

    Pair by pair: sorting rows of eight takes thirty times as long.
    """
    columns = np.ascontiguousarray(rows.reshape(-1, rows.shape[-1]).T)
    return any((columns[i] == columns[j]).any() for i in range(len(columns)) for j in range(i))
