"""How the tensors of a Megatron checkpoint are cut for a layout, by the families' tables; nothing is written here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.weights.convert.tensors import Rows, cast_rows
from megatron_rl.weights.convert.torch_dist import COMMON, HF, TRACKER, TorchDistReader, is_weight
from megatron_rl.weights.convert.torch_dist_target import Cut, TorchDistTarget, Whole
from megatron_rl.weights.convert.views import stored_name
from megatron_rl.weights.families import FAMILIES
from megatron_rl.weights.layouts import GateUp, Layout, Replicated, RowParallel
from megatron_rl.weights.mapping import EMBEDDING, Row


@dataclass(frozen=True)
class TargetLayout:
    """The layout that a Megatron checkpoint is cut for."""

    tensor: int = 1
    pipeline: int = 1
    vocab_multiple: int = 128
    """The vocabulary is padded to a multiple of this times `tensor`."""


_LAYOUTS: dict[str, Layout] = {
    stored_name(Row(rule, layer, ())): rule.layout
    for family in FAMILIES.values()
    for layer, rules in ((None, family.top), (0, family.layer))
    for rule in rules
}


def _layout_of(name: str) -> Layout:
    """How a tensor is split, by the end of its name: the optimizer's states are split as their parameters."""
    return next((layout for stored, layout in _LAYOUTS.items() if name.endswith(stored)), Replicated())


def cut(name: str, planes: Sequence[Rows], shape: tuple[int, ...], layout: TargetLayout) -> Whole:
    """The tensor `name` of `shape`, of which `planes` are the matrices or vectors, cut for a layout."""
    split, lead = _layout_of(name), len(shape) - len(planes[0].shape)
    rows, columns = (layout.tensor if split.is_split else 1), 1
    if isinstance(split, RowParallel):
        rows, columns = 1, layout.tensor
    elif isinstance(split, GateUp):
        rows = 2 * layout.tensor
    indices = [_index(number, shape[:lead]) for number in range(len(planes))]
    outside = 0 if EMBEDDING in name else layout.pipeline - 1
    cuts = {index: Cut(rows, columns, index[0] * layout.pipeline // shape[0] if lead else outside) for index in indices}
    return Whole(shape, dict(zip(indices, planes, strict=True)), cuts)


def _index(number: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(sizes):
        index.insert(0, number % size)
        number //= size
    return tuple(index)


def rewritten(
    root: Path, reader: TorchDistReader, layout: TargetLayout, dtype: torch.dtype | None = None
) -> TorchDistTarget:
    """All of a checkpoint, optimizer state and objects included, cut for a layout, its weights in `dtype` if given.

    What stands beside it in `root`, where that is a directory of Megatron-LM's, is copied.
    """
    tensors = {}
    for name, tensor in reader.tensors.items():
        planes: Sequence[Rows] = tensor.planes
        if dtype is not None and is_weight(name):
            planes = [cast_rows(plane, dtype) for plane in planes]
        tensors[name] = cut(name, planes, tensor.shape, layout)
    objects = {name: place.read() for name, place in reader.objects.items()}
    common = (reader.path / COMMON).read_bytes()
    if not (root / TRACKER).is_file() or reader.path.parent != root:
        return TorchDistTarget(tensors, common, objects)
    beside = root / HF if (root / HF).is_dir() else None
    tracker = (root / TRACKER).read_text().strip()
    return TorchDistTarget(tensors, common, objects, folder=f"{reader.path.name}/", hf=beside, tracker=tracker)
