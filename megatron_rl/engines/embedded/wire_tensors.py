"""Named tensors as they travel to the engine: one buffer for many, and pickles that may hold nothing but tensors.

Which parameters they are, and who may send them when, is decided elsewhere.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .weights import WeightsError

NamedTensors = list[tuple[str, torch.Tensor]]


@dataclass
class Entry:
    """One tensor of a bucket: bytes [start_idx, end_idx) of the buffer. The fields are SGLang's."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int
    """Bytes, as in SGLang, not elements."""


def entries_of(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[Entry]:
    """Where each tensor lies when they follow each other without gaps.

    Raises:
        WeightsError: the lists differ in length, a dtype is unknown, a dimension negative.
    """
    if not len(names) == len(dtypes) == len(shapes) > 0:
        counts = f"{len(names)} names, {len(dtypes)} dtypes, {len(shapes)} shapes"
        raise WeightsError(f"{counts}: wanted are as many of each, and at least one")
    found, start = [], 0
    for name, dtype_name, shape in zip(names, dtypes, shapes, strict=True):
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise WeightsError(f"{name}: unknown dtype {dtype_name!r}")
        if any(size < 0 for size in shape):
            raise WeightsError(f"{name}: negative dimension in shape {list(shape)}")
        size = torch.Size(shape).numel() * dtype.itemsize
        found.append(Entry(name, shape, dtype, start, start + size, size))
        start += size
    return found


def unflatten(buffer: torch.Tensor, entries: Sequence[Entry]) -> NamedTensors:
    """The tensors of a uint8 buffer [bytes], as views of it. Raises WeightsError naming the first that is not there."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1:
        raise WeightsError(f"a bucket is one uint8 tensor [bytes], got {buffer.dtype} {tuple(buffer.shape)}")
    found = []
    for entry in entries:
        try:
            tensor = buffer[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(tuple(entry.shape))
        except (RuntimeError, TypeError) as error:
            place = f"bytes {entry.start_idx} to {entry.end_idx} of {len(buffer)}"
            raise WeightsError(f"{entry.name}: {place} are no {entry.dtype} {tuple(entry.shape)}: {error}") from error
        found.append((entry.name, tensor))
    return found


def unpickle_tensors(payload: str, flattened: bool) -> NamedTensors:
    """The tensors of base64(pickle(...)): [(name, tensor), ...], or a bucket {"flattened_tensor", "metadata"}.

    No global is looked up by a name from the pickle: it can build tensors, dtypes, shapes and bucket entries, and
    nothing else, whoever made it.

    Raises:
        WeightsError: it holds something else, or is damaged.
    """
    try:
        content = _TensorUnpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()
        if flattened:
            return unflatten(
                _require_tensor(content["flattened_tensor"]), [_entry(item) for item in content["metadata"]]
            )
        return [(str(name), _require_tensor(tensor)) for name, tensor in content]
    except WeightsError:
        raise
    except Exception as error:  # bytes from outside can make the unpickler and the rebuilding raise anything
        raise WeightsError(f"serialized_named_tensors cannot be read: {error!r}") from error


def _entry(item: Any) -> Entry:
    shape = tuple(int(size) for size in item.shape)
    return Entry(str(item.name), shape, item.dtype, int(item.start_idx), int(item.end_idx), int(item.numel))


def _require_tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise WeightsError(f"serialized_named_tensors: expected a tensor, got {value!r:.80}")
    return value


class _TensorUnpickler(pickle.Unpickler):
    """Answers a few known names with functions made for this one pickle, which nothing in it can reach beyond."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        known: dict[tuple[str, str], Callable[..., Any]] = {
            ("torch", "Size"): lambda shape: torch.Size(shape),
            ("torch._utils", "_rebuild_tensor_v2"): lambda *words: _tensor(*words[:4]),
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
            ("torch.storage", "_load_from_bytes"): lambda data: torch.load(io.BytesIO(data), weights_only=True),
            ("collections", "OrderedDict"): lambda *_: OrderedDict(),
            ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): type("_Entry", (Entry,), {}),
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in it")
        return known[module, name]


def _tensor(storage: torch.TypedStorage, offset: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    flat = torch.empty(0, dtype=storage.dtype)
    room = storage._untyped_storage.nbytes() // flat.itemsize
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if min(offset, *shape, *stride, 0) < 0 or (0 not in shape and last >= room):
        raise pickle.UnpicklingError(f"a tensor of shape {tuple(shape)} does not fit its storage of {room}")
    return flat.set_(storage._untyped_storage, offset, tuple(shape), tuple(stride))
