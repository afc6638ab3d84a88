"""What is in a checkpoint, from its headers and metadata alone; how it is printed is up to the caller."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from megatron_rl.weights.convert.opened import Absent, Opened
from megatron_rl.weights.convert.torch_dist import StoredTensor, TorchDistReader
from megatron_rl.weights.safetensors_file import TensorOnDisk


@dataclass(frozen=True)
class Line:
    """One tensor: `cut` says in which file, or into which chunks."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    cut: str


def describe(source: Opened) -> tuple[list[Line], list[str]]:
    """The tensors by name, and a few sentences about all of them."""
    reader = source.reader
    if isinstance(reader, TorchDistReader):
        lines = [_line(tensor, _chunks(tensor)) for _, tensor in sorted(reader.tensors.items())]
        kind = f"Megatron torch_dist, {len(reader.objects)} objects beside the tensors"
    else:
        stored = [reader[name] for name in sorted(reader.names)]
        lines = [_line(tensor, tensor.file.name if isinstance(tensor, TensorOnDisk) else "absent") for tensor in stored]
        kind = "Hugging Face safetensors"
    sizes: Counter[str] = Counter()
    for line in lines:
        sizes[line.dtype] += line.size
    by_dtype = ", ".join(f"{dtype} {size:,}" for dtype, size in sizes.most_common())
    return lines, [
        f"{kind}; {len(lines)} tensors in {len(reader.files)} files",
        f"{sum(prod(line.shape) for line in lines):,} numbers, {sum(sizes.values()):,} bytes: {by_dtype}",
    ]


def _line(tensor: StoredTensor | TensorOnDisk | Absent, cut: str) -> Line:
    size = prod(tensor.shape) * tensor.dtype.itemsize
    return Line(tensor.name, tensor.shape, str(tensor.dtype).removeprefix("torch."), size, cut)


def _chunks(tensor: StoredTensor) -> str:
    """Such as `8 chunks (4 x 2 x 1)`: parts along each dimension, where the chunks form a grid."""
    parts = [len({chunk.offsets[axis] for chunk in tensor.chunks}) for axis in range(len(tensor.shape))]
    grid = f" ({' x '.join(map(str, parts))})" if prod(parts) == len(tensor.chunks) > 1 else ""
    return f"{len(tensor.chunks)} chunk{'s' if len(tensor.chunks) > 1 else ''}{grid}"
