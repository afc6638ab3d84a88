"""Reads Megatron's `torch_dist` checkpoints by their metadata: no model, no process group, no code out of a file runs.

    metadata.json    which format this is
    common.pt        what is not sharded: arguments, counters, the optimizer's settings
    .metadata        pickle: every tensor's name, global shape and dtype; where each chunk of it lies
    *.distcp         chunks, one behind the other, each a small zip archive (`torch.save`) whose record `data/0` is raw

A chunk's numbers are read straight from that record. The pickles are read by an unpickler that knows a handful of names
and refuses every other one.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.files import json_object, regular
from megatron_rl.weights import WeightsError
from megatron_rl.weights.convert.read_sums import ReadSums
from megatron_rl.weights.convert.restricted_pickle import ArrayOnDisk, read_array, read_metadata
from megatron_rl.weights.convert.stored_names import LAYERS, Parameter, parameter_at, without_number
from megatron_rl.weights.convert.tensors import Rows
from megatron_rl.weights.safetensors_file import read_elements

METADATA, COMMON, FORMAT = ".metadata", "common.pt", "metadata.json"
TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
"""Megatron-LM's name of the newest checkpoint in a directory, and what it holds for weights that no run has trained."""
HF = "hf"
"""Beside a checkpoint that was converted: config and tokenizer of the Hugging Face model."""


@dataclass(frozen=True)
class Place:
    """Some bytes of a file."""

    file: Path
    offset: int
    length: int

    def read(self) -> bytes:
        """All of them. Raises WeightsError when the file is shorter."""
        data = read_elements(self.file, self.offset, 0, self.length, torch.uint8, more_follows=False)
        return data.numpy().tobytes()


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: where it begins, how large it is, and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place

    def array(self, dtype: torch.dtype) -> ArrayOnDisk:
        """Where its numbers lie, after a look at the archive's directory.

        Raises:
            WeightsError: the archive is damaged, or does not hold what the metadata says.
        """
        try:
            with zipfile.ZipFile(_Window(self.place)) as archive:
                found = read_array(archive)
        except WeightsError:
            raise
        except Exception as error:  # bytes that are no archive with a pickle may raise anything
            raise WeightsError(
                f"{self.place.file}: the chunk at byte {self.place.offset} is damaged ({error!r}); copy the file again"
            ) from error
        if (found.dtype, found.shape) != (dtype, self.sizes):
            raise WeightsError(
                f"{self.place.file}: the chunk at byte {self.place.offset} is {found.dtype} {list(found.shape)} where "
                f".metadata says {dtype} {list(self.sizes)}; the files do not belong together"
            )
        return found

    def require_unchanged(self, array: ArrayOnDisk, begin: int, numbers: Tensor) -> None:
        """These were read, of `array` from byte `begin` on. Compares the record's checksum once all of it was read.

        Raises:
            WeightsError: the file has changed since it was written.
        """
        if array.checksum is None or not numbers.numel():
            return
        found = self._sums.add(array.nbytes, begin, numbers.view(torch.uint8).numpy().data)
        if found not in (None, array.checksum):
            raise WeightsError(
                f"{self.place.file}: the {list(self.sizes)} numbers of the chunk at byte {self.place.offset} have not "
                "the checksum (CRC-32) that they were written with; copy the file again, or take another checkpoint"
            )

    @cached_property
    def _sums(self) -> ReadSums:
        return ReadSums()


_ENDS_BYTES = 4096
"""Of an archive's beginning and of its end: all but its numbers, as a rule."""


class _Window(io.RawIOBase):
    """Part of a file, as a file, of which the two ends are read at once."""

    def __init__(self, place: Place) -> None:
        self._place, self._position = place, 0
        end = max(0, place.length - _ENDS_BYTES)
        self._ends = {begin: self._read(begin, _ENDS_BYTES) for begin in (0, end)}

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._place.length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._place.length - self._position)
        size = left if size < 0 else min(size, left)
        for begin, known in self._ends.items():
            if begin <= self._position and self._position + size <= begin + len(known):
                part = known[self._position - begin :][:size]
                break
        else:
            part = self._read(self._position, size)
        self._position += size
        return part

    def _read(self, begin: int, size: int) -> bytes:
        return Place(self._place.file, self._place.offset + begin, min(size, self._place.length - begin)).read()


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: its global shape, and its chunks."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...] = field(repr=False)

    @cached_property
    def planes(self) -> list[Plane]:
        """The tensor as matrices or vectors: one for each layer, and for each expert where there are any.

        Raises:
            WeightsError: the chunks leave some numbers out, or hold some twice.
        """
        layered = LAYERS in self.name and without_number(self.name) == self.name
        if not self.shape:
            raise WeightsError(f"{self.name}: a single number, which is not read from a Megatron checkpoint")
        if not _fill(self.shape, self.chunks):
            raise WeightsError(f"{self.name}: its chunks overlap, or leave numbers out; the checkpoint is incomplete")
        lead = max(1 if layered and len(self.shape) > 1 else 0, len(self.shape) - 2)
        by_lead: dict[tuple[int, ...], list[Chunk]] = {}
        for chunk in self.chunks:
            ranges = [range(chunk.offsets[i], chunk.offsets[i] + chunk.sizes[i]) for i in range(lead)]
            for index in product(*ranges):
                by_lead.setdefault(index, []).append(chunk)
        return [
            Plane(self, index, tuple(by_lead.get(index, ())))
            for index in product(*(range(size) for size in self.shape[:lead]))
        ]


def _fill(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> bool:
    """Whether every number of a tensor is in one chunk.

    The chunks that hold a number are counted by a function of its place. Where they begin and end, at corners, this
    function steps up and down: it is 1 inside the tensor and 0 outside if these steps are those of the tensor alone.
    """
    whole = [(0, size) for size in shape]
    boxes = [[(begin, begin + size) for begin, size in zip(c.offsets, c.sizes, strict=True)] for c in chunks]
    cut = [axis for axis, whole_range in enumerate(whole) if any(box[axis] != whole_range for box in boxes)]
    steps: Counter[tuple[int, ...]] = Counter()
    for box, sign in [*((box, 1) for box in boxes), (whole, -1)]:
        for ends in product((0, 1), repeat=len(cut)):
            steps[tuple(box[axis][end] for axis, end in zip(cut, ends, strict=True))] += sign * (-1) ** sum(ends)
    return not any(steps.values())


@dataclass(frozen=True)
class Plane:
    """The matrix or vector of a tensor at `index` of its leading dimensions."""

    tensor: StoredTensor
    index: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def name(self) -> str:
        return self.tensor.name + "".join(f"[{i}]" for i in self.index)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape[len(self.index) :]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @cached_property
    def _arrays(self) -> list[ArrayOnDisk]:
        return [chunk.array(self.dtype) for chunk in self.chunks]

    def rows(self, begin: int, end: int) -> Tensor:
        """As `Rows.rows`; chunks that split columns are put side by side.

        Raises:
            WeightsError: no chunk holds some of the numbers, or a file is damaged.
        """
        for chunk, array in zip(self.chunks, self._arrays, strict=True):
            if self._has_all(chunk, begin, end):
                return self._read(chunk, array, begin, end)
        part = torch.empty(end - begin, *self.shape[1:], dtype=self.dtype)
        filled = 0
        for chunk, array in zip(self.chunks, self._arrays, strict=True):
            filled += self._copy(chunk, array, part, begin, end)
        if filled != part.numel():
            raise WeightsError(
                f"{self.name}: rows {begin} to {end} have {filled} of {part.numel()} numbers in the checkpoint; it is "
                "incomplete, or chunks overlap"
            )
        return part

    def num_reads(self, begin: int, end: int) -> int:
        """Chunks that hold some of these rows."""
        axis = len(self.index)
        return sum(
            chunk.offsets[axis] < end and begin < chunk.offsets[axis] + chunk.sizes[axis] for chunk in self.chunks
        )

    def _has_all(self, chunk: Chunk, begin: int, end: int) -> bool:
        """Whether these rows lie one behind the other in the chunk."""
        lead = len(self.index)
        top, height = chunk.offsets[lead], chunk.sizes[lead]
        return top <= begin and end <= top + height and chunk.sizes[lead + 1 :] == self.shape[1:]

    def _read(self, chunk: Chunk, array: ArrayOnDisk, first: int, last: int) -> Tensor:
        """Rows `first` to `last`, which the chunk has, in all of its columns."""
        lead = len(self.index)
        top, height, width = chunk.offsets[lead], chunk.sizes[lead], math.prod(chunk.sizes[lead + 1 :])
        index = 0
        for i in range(lead):
            index = index * chunk.sizes[i] + self.index[i] - chunk.offsets[i]
        start = (index * height + first - top) * width
        offset = chunk.place.offset + array.offset
        found = read_elements(chunk.place.file, offset, start, (last - first) * width, self.dtype)
        chunk.require_unchanged(array, start * self.dtype.itemsize, found)
        return found.view(last - first, *chunk.sizes[lead + 1 :])

    def _copy(self, chunk: Chunk, array: ArrayOnDisk, part: Tensor, begin: int, end: int) -> int:
        lead = len(self.index)
        top, height = chunk.offsets[lead], chunk.sizes[lead]
        first, last = max(begin, top), min(end, top + height)
        if first >= last:
            return 0
        target = part[first - begin : last - begin]
        if len(chunk.sizes) > lead + 1:
            left = chunk.offsets[lead + 1]
            target = target[:, left : left + chunk.sizes[lead + 1]]
        target.copy_(self._read(chunk, array, first, last))
        return target.numel()


class TorchDistReader:
    """A checkpoint directory: tensors, and objects that are not tensors, by name.

    Raises:
        WeightsError: not such a checkpoint, or files are missing, cut short or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, Place] = {}
        try:
            self._read(read_metadata(path / METADATA))
            self._check_sizes()
        except WeightsError:
            raise
        except Exception as error:  # bytes that are no pickle of this kind may raise anything
            raise WeightsError(f"{path / METADATA}: cannot be read ({error!r}); copy the checkpoint again") from error

    def _read(self, metadata: Any) -> None:
        places: dict[str, dict[tuple[int, ...], Place]] = {}
        for index, info in metadata.storage_data.items():
            if getattr(info, "transform_descriptors", None):
                raise WeightsError(
                    f"{self.path}: {index.fqn} is stored compressed, which cannot be read; save it plainly"
                )
            place = Place(self.path / info.relative_path, *_counts((info.offset, info.length)))
            places.setdefault(index.fqn, {})[tuple(index.offset or ())] = place
        for name, facts in metadata.state_dict_metadata.items():
            self._add(name, facts, places.get(name, {}))

    @property
    def files(self) -> list[Path]:
        """All files that the metadata names, in order."""
        return sorted({place.file for place in self._places()})

    def _places(self) -> list[Place]:
        chunks = [chunk.place for tensor in self.tensors.values() for chunk in tensor.chunks]
        return [*chunks, *self.objects.values()]

    def _add(self, name: str, facts: Any, places: Mapping[tuple[int, ...], Place]) -> None:
        if not hasattr(facts, "chunks"):
            if () in places:
                self.objects[name] = places[()]
            return
        chunks, dtype = [], facts.properties.dtype
        if not (isinstance(name, str) and isinstance(dtype, torch.dtype)):
            raise TypeError(f"{name!r} is said to be a tensor of {dtype!r}")
        for chunk in facts.chunks:
            offsets, sizes = _counts(chunk.offsets), _counts(chunk.sizes)
            if offsets not in places:
                raise WeightsError(
                    f"{self.path}: no file holds {name} from {list(offsets)} on; the save was not complete"
                )
            if math.prod(sizes) * dtype.itemsize > places[offsets].length:
                raise ValueError(f"{places[offsets].length} bytes for the {sizes} numbers of {name}")
            chunks.append(Chunk(offsets, sizes, places[offsets]))
        self.tensors[name] = StoredTensor(name, _counts(facts.size), dtype, tuple(chunks))

    def _check_sizes(self) -> None:
        ends: dict[Path, int] = {}
        for place in self._places():
            ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
        for file, end in ends.items():
            if not file.is_file():
                raise WeightsError(f"{file}: file is missing; copy it again from the checkpoint")
            if (size := file.stat().st_size) < end:
                raise WeightsError(f"{file}: cut short ({size} bytes instead of {end}); copy the file again")

    def every_plane(self) -> dict[str, Plane]:
        """All tensors, the optimizer's too, as matrices and vectors by their own names."""
        return {plane.name: plane for _, tensor in sorted(self.tensors.items()) for plane in tensor.planes}

    def weights(self) -> dict[Parameter, Rows]:
        """The model's parameters."""
        return {
            parameter_at(name, plane.index): plane
            for name, tensor in self.tensors.items()
            if is_weight(name)
            for plane in tensor.planes
        }


def _counts(numbers: Iterable[Any]) -> tuple[int, ...]:
    """All of them. Raises ValueError where one is no whole number, or below zero."""
    found = tuple(numbers)
    if wrong := [number for number in found if type(number) is not int or number < 0]:
        raise ValueError(f"{wrong[0]!r} is no count")
    return found


def is_weight(name: str) -> bool:
    """Whether this is a parameter of the model, and not of the optimizer or of a tensor library's own state."""
    return not name.startswith("optimizer.") and "_extra_state" not in name


def find_torch_dist(path: Path) -> Path | None:
    """The directory with the tensors: `path` itself, its `policy/`, or the iteration that Megatron-LM's file names.

    Raises:
        WeightsError: that file names none.
    """
    for folder in _candidates(path):
        try:
            if json_object(regular(folder / FORMAT).read_bytes()).get("sharded_backend") == "torch_dist":
                return folder
        except (OSError, ValueError):
            continue
    return None


def _candidates(path: Path) -> Iterator[Path]:
    yield path
    yield path / "policy"
    tracker = path / TRACKER
    if tracker.is_file():
        newest = tracker.read_bytes().strip()
        if newest != RELEASE.encode() and not newest.isdigit():
            raise WeightsError(
                f"{tracker}: {newest[:40]!r} is neither an iteration nor {RELEASE!r}; give one of the folders there"
            )
        yield path / (RELEASE if newest == RELEASE.encode() else f"iter_{newest.decode().zfill(7)}")
