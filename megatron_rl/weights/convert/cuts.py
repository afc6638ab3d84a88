"""How the tensors of a Megatron checkpoint are cut for a layout, by the families' tables; nothing is written here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.config.shards import stage_layers
from megatron_rl.files import regular
from megatron_rl.weights import WeightsError
from megatron_rl.weights.convert.stored_names import LAYERS, expert_at, layer_at, without_number
from megatron_rl.weights.convert.tensors import Rows, cast_rows
from megatron_rl.weights.convert.torch_dist import COMMON, HF, TRACKER, TorchDistReader, is_weight
from megatron_rl.weights.convert.torch_dist_target import Cut, TorchDistTarget, Whole
from megatron_rl.weights.families import FAMILIES
from megatron_rl.weights.layouts import GateUp, Layout, Replicated, RowParallel
from megatron_rl.weights.mapping import EMBEDDING


@dataclass(frozen=True)
class TargetLayout:
    """The layout that a Megatron checkpoint is cut for."""

    tensor: int = 1
    pipeline: int = 1
    vocab_multiple: int = 128
    """The vocabulary is padded to a multiple of this times `tensor`."""
    virtual: int | None = None
    """Model chunks of each pipeline stage."""
    first: int | None = None
    last: int | None = None
    """Layers of the first and the last stage; None: as many as of the others."""
    expert: int = 1
    expert_tensor: int = 1

    def stages(self, num_layers: int) -> list[int]:
        """The pipeline stage of every layer.

        Raises:
            WeightsError: the layers cannot be dealt like this.
        """
        given = {"--vpp": self.virtual, "--first-stage-layers": self.first, "--last-stage-layers": self.last}
        idle = [f"{option} {value}" for option, value in given.items() if value is not None]
        if idle and self.pipeline == 1:
            raise WeightsError(f"{', '.join(idle)}: there is one stage; give --pp 2 or more, or leave it out")
        try:
            pipeline = ParallelConfig(
                pipeline_model_parallel_size=self.pipeline,
                virtual_pipeline_model_parallel_size=self.virtual,
                num_layers_in_first_pipeline_stage=self.first,
                num_layers_in_last_pipeline_stage=self.last,
            )
            table = stage_layers(num_layers, pipeline)
        except ValueError as error:
            raise WeightsError(
                f"--pp {self.pipeline}, --vpp {self.virtual}, --first-stage-layers {self.first}, --last-stage-layers "
                f"{self.last} do not fit {num_layers} layers: {error}"
            ) from error
        stage_of = {layer: stage for stage, chunks in enumerate(table) for chunk in chunks for layer in chunk}
        return [stage_of[layer] for layer in range(num_layers)]


_LAYOUTS: dict[str, Layout] = {
    rule.megatron.replace("mlp.experts.", "mlp.experts.experts."): rule.layout
    for family in FAMILIES.values()
    for rule in (*family.top, *family.layer)
}
"""By the end of a stored name, behind the layers' prefix."""


def _layout_of(name: str) -> Layout:
    """How a tensor is split: the optimizer's states are split as their parameters."""
    _, layers, suffix = without_number(name).partition(LAYERS)
    if layers:
        return _LAYOUTS.get(suffix, Replicated())
    return next((layout for end, layout in _LAYOUTS.items() if name.endswith(end)), Replicated())


def cut(name: str, planes: Mapping[tuple[int, ...], Rows], layout: TargetLayout, stages: Sequence[int]) -> Whole:
    """The tensor `name` cut for a layout, of which `planes` are the matrices or vectors by their index.

    Args:
        stages: the pipeline stage of every layer.
    """
    split = _layout_of(name)
    indices = list(planes)
    ranks = layout.tensor if expert_at(name, indices[0]) is None else layout.expert_tensor
    rows, columns = (ranks if split.is_split else 1), 1
    if isinstance(split, RowParallel):
        rows, columns = 1, ranks
    elif isinstance(split, GateUp):
        rows = 2 * ranks
    outside = 0 if EMBEDDING in name else layout.pipeline - 1
    experts = max(expert_at(name, index) or 0 for index in indices) + 1
    cuts = {}
    for index in indices:
        layer, expert = layer_at(name, index), expert_at(name, index)
        stage = outside if layer is None or layer >= len(stages) else stages[layer]
        cuts[index] = Cut(rows, columns, (stage, -1 if expert is None else expert * layout.expert // experts))
    lead = tuple(max(sizes) + 1 for sizes in zip(*indices, strict=True))
    return Whole((*lead, *planes[indices[0]].shape), planes, cuts)


def rewritten(
    root: Path, reader: TorchDistReader, layout: TargetLayout, dtype: torch.dtype | None = None
) -> TorchDistTarget:
    """All of a checkpoint, optimizer state and objects included, cut for a layout, its weights in `dtype` if given.

    What stands beside it in `root`, where that is a directory of Megatron-LM's, is copied.
    """
    every = {name: {plane.index: plane for plane in tensor.planes} for name, tensor in reader.tensors.items()}
    layers = [
        layer for name, planes in every.items() for index in planes if (layer := layer_at(name, index)) is not None
    ]
    stages, tensors = layout.stages(max(layers) + 1) if layers else [], {}
    for name, planes in every.items():
        is_cast = dtype is not None and is_weight(name)
        tensors[name] = cut(
            name, {i: cast_rows(plane, dtype) if is_cast else plane for i, plane in planes.items()}, layout, stages
        )
    objects = {name: place.read() for name, place in reader.objects.items()}
    try:
        common = regular(reader.path / COMMON).read_bytes()
    except OSError as error:
        raise WeightsError(f"{reader.path / COMMON}: cannot be read ({error}); copy the checkpoint again") from error
    if not (root / TRACKER).is_file() or reader.path.parent != root:
        return TorchDistTarget(tensors, common, objects)
    beside = root / HF if (root / HF).is_dir() else None
    tracker = (root / TRACKER).read_text().strip()
    return TorchDistTarget(tensors, common, objects, folder=f"{reader.path.name}/", hf=beside, tracker=tracker)
