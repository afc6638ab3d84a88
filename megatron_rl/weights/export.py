"""Streams Megatron weights as Hugging Face tensors, by parameter or by bucket; writing or sending them is elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_rl.weights.buckets import Bucket, TensorSpec, plan_buckets
from megatron_rl.weights.families import family_of
from megatron_rl.weights.mapping import Mapped, mapped_parameters

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.config import HfConfig

MIB = 2**20


def export_hf_weights(chunks: Sequence[Any], hf: HfConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) for every parameter of this rank's pipeline stage.

    Collective over the tensor-parallel group, and over it only: all its ranks must run the generator to its end, and
    each gets the same tensors, in the model's dtype and on its device. Pipeline stages yield their own layers; of tied
    embeddings only the first stage's is yielded, as `model.embed_tokens.weight`. Tensors may share memory with
    parameters: use or copy them before the next optimizer step.
    """
    for mapped in _exported(chunks, hf):
        yield from zip(mapped.hf, _whole(mapped, hf), strict=True)


@dataclass(frozen=True)
class ExportPlan:
    """Which bucket each tensor of this pipeline stage travels in; equal on all ranks of the stage.

    Attributes:
        stage: the parameters, in the order of their tensors.
        buckets: of Hugging Face tensors, in the dtype that leaves.
    """

    stage: tuple[Mapped, ...]
    hf: HfConfig
    buckets: tuple[Bucket, ...]

    @cached_property
    def capacity(self) -> int:
        """Bytes of the largest bucket, which is what a buffer must hold."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)

    @property
    def nbytes(self) -> int:
        """Of the whole stage."""
        return sum(bucket.nbytes for bucket in self.buckets)


def plan_export(chunks: Sequence[Any], hf: HfConfig, dtype: torch.dtype | None, bucket_bytes: int) -> ExportPlan:
    """Plan the export of this rank's stage from shapes alone; nothing is gathered.

    Whoever fills buckets has two buffers (one is sent while the next is filled) and, for a moment, one parameter that
    is put together from its parts. The buckets are chosen so that all this fits `2 * bucket_bytes`, unless a single
    parameter is too large for that: then a bucket is as large as it.

    Args:
        dtype: floating-point format to cast to; None = the parameters'.
    """
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    stage = tuple(_exported(chunks, hf))
    groups = [_specs(mapped, hf, size, dtype) for mapped in stage]
    assembled = max((_assembly_bytes(mapped, size) for mapped in stage), default=0)
    return ExportPlan(stage, hf, tuple(plan_buckets(groups, max(1, bucket_bytes - assembled // 2))))


def export_buckets(plan: ExportPlan, device: torch.device | str | None) -> Iterator[tuple[Bucket, Tensor | None]]:
    """Yield every bucket of the plan with a flat uint8 buffer that holds it.

    Collective over the tensor-parallel group, as `export_hf_weights`. Two buffers are used in turn: a bucket must have
    been sent when the one after the next is asked for.

    Args:
        device: where the buffers are; None on a rank that only takes part in the gathering and gets no buffer.
    """
    buffers: list[Tensor] = []
    if device is not None:
        buffers = [torch.empty(plan.capacity, dtype=torch.uint8, device=device) for _ in plan.buckets[:2]]
    parameters = iter(plan.stage)
    for number, bucket in enumerate(plan.buckets):
        flat = buffers[number % 2] if buffers else None
        targets = None if flat is None else bucket.views(flat)
        filled = 0
        while filled < len(bucket.tensors):
            filled += _put(next(parameters), plan.hf, None if targets is None else targets[filled:])
        yield bucket, flat


def _put(mapped: Mapped, hf: HfConfig, targets: Sequence[Tensor] | None) -> int:
    """Copy a parameter's tensors to the first of `targets`; how many they are. Nothing of them is left behind."""
    tensors = _whole(mapped, hf)
    for target, tensor in zip(targets or [], tensors, strict=False):
        target.copy_(tensor)
    return len(tensors)


def _exported(chunks: Sequence[Any], hf: HfConfig) -> Iterator[Mapped]:
    family = family_of(hf)
    for chunk in chunks:
        yield from (mapped for mapped in mapped_parameters(chunk, family, hf) if not mapped.is_tied_copy)


def _specs(mapped: Mapped, hf: HfConfig, tp: int, dtype: torch.dtype | None) -> list[TensorSpec]:
    """What `_whole` will return, from shapes."""
    shard = torch.empty(mapped.parameter.shape, device="meta")
    wholes = mapped.layout.full([shard] * (tp if mapped.layout.is_split else 1), hf)
    parameter = mapped.parameter
    wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    return [TensorSpec(name, tuple(whole.shape), wanted) for name, whole in zip(mapped.hf, wholes, strict=True)]


def _assembly_bytes(mapped: Mapped, tp: int) -> int:
    """Memory that `_whole` takes at most: the gathered parts and, from them, the tensors."""
    parameter = mapped.parameter
    size = parameter.numel() * parameter.element_size()
    return 2 * tp * size if mapped.layout.is_split and tp > 1 else size * (len(mapped.hf) > 1)


@torch.no_grad()
def _whole(mapped: Mapped, hf: HfConfig) -> list[Tensor]:
    """The Hugging Face tensors of a parameter. Collective over the tensor-parallel group."""
    from megatron.core import parallel_state

    parameter = mapped.parameter.detach()
    group = parallel_state.get_tensor_model_parallel_group()
    return mapped.layout.full(_gather(parameter, group) if mapped.layout.is_split else [parameter], hf)


def _gather(parameter: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    size = dist.get_world_size(group)
    if size == 1:
        return [parameter]
    gathered = parameter.new_empty((size * parameter.shape[0], *parameter.shape[1:]))
    parts = list(gathered.chunk(size))
    if dist.get_backend(group) == "gloo":
        # Its all_gather would make a second copy of everything.
        parts[dist.get_rank(group)].copy_(parameter)
        for source, part in zip(dist.get_process_group_ranks(group), parts, strict=True):
            dist.broadcast(part, src=source, group=group)
    else:
        dist.all_gather_into_tensor(gathered, parameter.contiguous(), group=group)
    return parts
