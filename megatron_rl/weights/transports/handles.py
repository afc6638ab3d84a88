"""A bucket as text for `/update_weights_from_tensor`: handles of CUDA memory, or the values; nothing is sent here.

SGLang reads base64(pickle(...)) and takes nothing but tensors, shapes and its own description of a bucket. That class
is named without being imported: SGLang is not installed where the trainer runs.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megatron_rl.weights.buckets import Bucket

_METADATA = b"csglang.srt.weight_sync.tensor_bucket\nFlattenedTensorMetadata\n"
"""Pickle's opcode for a name in a module, and the name."""
_DEVICE = 6
"""Which argument of `rebuild_cuda_tensor` is the device's number; SGLang takes its UUID there, too."""


def value_payload(bucket: Bucket, flat: Tensor) -> str:
    """The tensors themselves, for engines on a CPU: handles of host memory would need a socket between the processes.

    Args:
        flat: uint8 on the CPU, of at least `bucket.nbytes` bytes.
    """
    # A view would take the whole buffer along, each of them: clones have storages of their own.
    named = [(name, view.clone()) for name, view in bucket.views(flat).items()]
    return base64.b64encode(pickle.dumps(named, protocol=4)).decode()


def handle_payload(bucket: Bucket, flat: Tensor) -> str:
    """A CUDA-IPC handle of the buffer, and where each tensor lies in it. The buffer must live until it was loaded.

    Args:
        flat: uint8 on a device, of at least `bucket.nbytes` bytes.
    """
    output = io.BytesIO()
    entries = [
        _Entry(
            name=tensor.name,
            shape=torch.Size(tensor.shape),
            dtype=tensor.dtype,
            start_idx=begin,
            end_idx=end,
            numel=end - begin,
        )
        for tensor, (begin, end) in zip(bucket.tensors, bucket.bounds, strict=True)
    ]
    _HandlePickler(output, protocol=4).dump({"flattened_tensor": flat[: bucket.nbytes], "metadata": entries})
    return base64.b64encode(output.getvalue()).decode()


class _Entry(dict[str, Any]):
    """The fields of SGLang's dataclass for one tensor of a bucket."""


class _HandlePickler(pickle._Pickler):
    """Tensors as CUDA-IPC handles, with the device's UUID: engines may see the devices under other numbers."""

    dispatch: ClassVar[dict[type, Callable[..., None]]] = dict(pickle._Pickler.dispatch)

    def reducer_override(self, value: Any) -> Any:
        """The hook of pickle: how to rebuild `value`."""
        if not isinstance(value, Tensor):
            return NotImplemented
        rebuild, words = reductions.reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(words[_DEVICE]).uuid)
        return rebuild, (*words[:_DEVICE], uuid, *words[_DEVICE + 1 :])

    def save_entry(self, entry: _Entry) -> None:
        """`FlattenedTensorMetadata.__new__` without arguments, then its fields."""
        self.write(_METADATA)  # type: ignore[attr-defined]
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)  # type: ignore[attr-defined]
        self.save(dict(entry))  # type: ignore[attr-defined]
        self.write(pickle.BUILD)  # type: ignore[attr-defined]

    dispatch[_Entry] = save_entry
