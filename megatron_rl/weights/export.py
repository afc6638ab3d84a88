"""Streams Megatron weights as Hugging Face tensors, by parameter or by bucket; writing or sending them is elsewhere.

A bucket is put together on the ranks that hold parts of its tensors, with one collective for all of them:

    what is no expert's    gathered over the tensor-parallel group
    then the experts       gathered over the expert-tensor-parallel group of the expert-parallel rank that has them,
                           one such rank after the other, and handed on, finished, over the expert-parallel group
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_rl.weights import fp8
from megatron_rl.weights.buckets import Bucket, TensorSpec, plan_buckets
from megatron_rl.weights.families import family_of
from megatron_rl.weights.mapping import Mapped, mapped_parameters
from megatron_rl.weights.place import Place

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.config import HfConfig

MIB = 2**20


def export_hf_weights(chunks: Sequence[Any], hf: HfConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) for every parameter of this rank's pipeline stage.

    Collective over all ranks of the stage: all must run the generator to its end, and each gets the same tensors, which
    are its own, in the model's dtype and on its device. Stages yield their own layers; of tied embeddings only the
    first stage's is yielded, as `model.embed_tokens.weight`.
    """
    plan = plan_export(chunks, hf, None, 512 * MIB)
    for bucket, flat in export_buckets(plan, plan.device, Place.of_this_rank(everywhere=True)):
        assert flat is not None
        for name, view in bucket.views(flat).items():
            yield name, view.clone()


@dataclass(frozen=True)
class Parcel:
    """A bucket, and what it is made of.

    Attributes:
        parameters: this rank's; other ranks of the group have as many, of the same shapes.
        names: the tensors that each of them becomes.
        owner: the expert-parallel rank whose experts they are; None = no expert's.
    """

    bucket: Bucket
    parameters: tuple[Mapped, ...]
    names: tuple[tuple[str, ...], ...]
    owner: int | None

    @cached_property
    def split(self) -> list[Tensor]:
        """Those of the parameters of which each rank of the group has a part."""
        return [mapped.parameter for mapped in self.parameters if mapped.layout.is_split]


@dataclass(frozen=True)
class ExportPlan:
    """Which bucket each tensor of this pipeline stage travels in; the buckets are equal on all ranks of the stage."""

    parcels: tuple[Parcel, ...]
    hf: HfConfig
    device: torch.device
    """Of the parameters."""
    dtype: torch.dtype | None

    @property
    def buckets(self) -> list[Bucket]:
        """Of Hugging Face tensors, in the dtypes that leave."""
        return [parcel.bucket for parcel in self.parcels]

    @cached_property
    def capacity(self) -> int:
        """Bytes of the largest bucket, which is what a buffer must hold."""
        return max((parcel.bucket.nbytes for parcel in self.parcels), default=0)


def plan_export(chunks: Sequence[Any], hf: HfConfig, dtype: torch.dtype | None, bucket_bytes: int) -> ExportPlan:
    """Plan the export of this rank's stage from shapes alone; nothing is gathered.

    Whoever fills buckets has two buffers (one is sent while the next is filled), the gathered parts of one bucket, and
    for a moment one parameter that is put together from them. The buckets are chosen so that all this fits
    `2 * bucket_bytes`, unless a single parameter is too large for that: then a bucket is as large as it.

    Args:
        dtype: floating-point format to cast to; None = the parameters'. float8_e4m3fn: matrices of layers, but the
            router's, leave in blocks with scales (`fp8`), all else in bfloat16.
    """
    from megatron.core import parallel_state

    family = family_of(hf)
    stage = [m for chunk in chunks for m in mapped_parameters(chunk, family, hf) if not m.is_tied_copy]
    tp = parallel_state.get_tensor_model_parallel_world_size()
    etp = parallel_state.get_expert_tensor_parallel_world_size()
    capacity = _capacity([(m, tp if m.expert is None else etp) for m in stage], dtype, bucket_bytes)
    dense = [(m, m.hf) for m in stage if m.expert is None]
    parcels = _parcels(dense, None, tp, hf, dtype, capacity)
    own = [(m, m.expert) for m in stage if m.expert is not None]
    each = len({expert for _, expert in own})
    for owner in range(parallel_state.get_expert_model_parallel_world_size() if own else 0):
        # The experts there have other numbers than those here, and everything else in common.
        shift = (owner - parallel_state.get_expert_model_parallel_rank()) * each
        parcels += _parcels([(m, m.hf_of(expert + shift)) for m, expert in own], owner, etp, hf, dtype, capacity)
    return ExportPlan(tuple(parcels), hf, stage[0].parameter.device, dtype)


def export_buckets(
    plan: ExportPlan, device: torch.device | str | None, place: Place
) -> Iterator[tuple[Bucket, Tensor | None]]:
    """Yield every bucket of the plan with a flat uint8 buffer that holds it.

    Collective over the ranks of the stage of which `place` says that they take part. Two buffers are used in turn: a
    bucket must have been sent when the one after the next is asked for.

    Args:
        device: where the buffers are; None on a rank that only gives, and gets no buffer.
        place: this rank's; where it `sends`, `device` is not None.
    """
    device = None if device is None else torch.device(device)
    count = 0 if device is None else min(2, len(plan.parcels))
    buffers = [torch.empty(plan.capacity, dtype=torch.uint8, device=device) for _ in range(count)]
    is_here = device is not None and device.type == plan.device.type
    assembly = _Assembly(plan, place)
    works = place.sends or (place.relays and any(parcel.owner is not None for parcel in plan.parcels))
    bench = torch.empty(plan.capacity, dtype=torch.uint8, device=plan.device) if works and not is_here else None
    for number, parcel in enumerate(plan.parcels):
        flat = buffers[number % 2] if buffers else None
        work = flat if is_here else bench
        assembly.run(parcel, work)
        if flat is not None and work is not None and not is_here:
            flat[: parcel.bucket.nbytes].copy_(work[: parcel.bucket.nbytes])
        yield parcel.bucket, flat


class _Assembly:
    """Puts buckets together, one after the other. All that it needs of memory is taken once."""

    def __init__(self, plan: ExportPlan, place: Place) -> None:
        from megatron.core import parallel_state

        self._plan, self._place = plan, place
        self._dtype = None if plan.dtype is fp8.FP8 else plan.dtype
        self._owner = parallel_state.get_expert_model_parallel_rank()
        self._dense = parallel_state.get_tensor_model_parallel_group()
        self._experts = parallel_state.get_expert_tensor_parallel_group()
        self._relay = parallel_state.get_expert_model_parallel_group()
        self._scratch = torch.empty(max(map(self._gathered, plan.parcels)), dtype=torch.uint8, device=plan.device)

    @torch.no_grad()
    def run(self, parcel: Parcel, work: Tensor | None) -> None:
        """Fill `work` with the bucket where this rank gets it; without it, the rank only gives. Collective."""
        place = self._place
        if self._gives(parcel):
            keeps = place.sends if parcel.owner is None else place.relays
            self._fill(parcel, work if keeps else None)
        if parcel.owner is not None and place.relays and dist.get_world_size(self._relay) > 1:
            assert work is not None
            source = dist.get_process_group_ranks(self._relay)[parcel.owner]
            dist.broadcast(work[: parcel.bucket.nbytes], src=source, group=self._relay)

    def _gives(self, parcel: Parcel) -> bool:
        if parcel.owner is None:
            return self._place.gives_dense
        return self._place.gives_experts and parcel.owner == self._owner

    def _group(self, parcel: Parcel) -> dist.ProcessGroup:
        return self._dense if parcel.owner is None else self._experts

    def _gathered(self, parcel: Parcel) -> int:
        """Bytes of the parts that all ranks of the group hold of a parcel, where there are other ranks."""
        size = dist.get_world_size(self._group(parcel))
        if size == 1 or not self._gives(parcel):
            return 0
        return sum(size * p.numel() * (self._dtype or p.dtype).itemsize for p in parcel.split)

    def _fill(self, parcel: Parcel, work: Tensor | None) -> None:
        gathered = iter(self._gather(parcel))
        targets = None if work is None else parcel.bucket.views(work)
        for mapped, names in zip(parcel.parameters, parcel.names, strict=True):
            shards = next(gathered) if mapped.layout.is_split else [mapped.parameter.detach()]
            if targets is not None:
                _put(mapped.layout.full(shards, self._plan.hf), names, targets)

    def _gather(self, parcel: Parcel) -> list[list[Tensor]]:
        """The parts of each split parameter that the ranks of the group hold; one collective for all of them."""
        group, parameters = self._group(parcel), parcel.split
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        if size == 1 or not parameters:
            return [[parameter.detach()] for parameter in parameters]
        counts = [parameter.numel() for parameter in parameters]
        rows = self._scratch[: self._gathered(parcel)].view(self._dtype or parameters[0].dtype).view(size, -1)
        for own, parameter in zip(rows[rank].split(counts), parameters, strict=True):
            own.view(parameter.shape).copy_(parameter)
        if dist.get_backend(group) == "gloo":
            # Its all_gather would make a second copy of everything.
            for source, row in zip(dist.get_process_group_ranks(group), rows, strict=True):
                dist.broadcast(row, src=source, group=group)
        else:
            dist.all_gather_into_tensor(rows, rows[rank], group=group)
        parts = [row.split(counts) for row in rows]
        return [[row[i].view(parameter.shape) for row in parts] for i, parameter in enumerate(parameters)]


def _put(tensors: Sequence[Tensor], names: Sequence[str], targets: Mapping[str, Tensor]) -> None:
    for name, tensor in zip(names, tensors, strict=True):
        if name + fp8.SUFFIX in targets:
            values, scales = fp8.quantise(tensor)
            targets[name].copy_(values)
            targets[name + fp8.SUFFIX].copy_(scales)
        else:
            targets[name].copy_(tensor)


# ------------------------------------------------------------------------------------------------------------- planning


def _parcels(
    parameters: Sequence[tuple[Mapped, tuple[str, ...]]],
    owner: int | None,
    ranks: int,
    hf: HfConfig,
    dtype: torch.dtype | None,
    capacity: int,
) -> list[Parcel]:
    """Buckets of these parameters and what their tensors are called, in their order."""
    groups = [_specs(mapped, names, hf, ranks, dtype) for mapped, names in parameters]
    left, parcels = iter(zip(parameters, groups, strict=True)), []
    for bucket in plan_buckets(groups, capacity):
        inside: list[tuple[Mapped, tuple[str, ...]]] = []
        filled = 0
        while filled < len(bucket.tensors):
            parameter, group = next(left)
            inside.append(parameter)
            filled += len(group)
        parcels.append(Parcel(bucket, tuple(m for m, _ in inside), tuple(names for _, names in inside), owner))
    return parcels


def _specs(
    mapped: Mapped, names: Sequence[str], hf: HfConfig, ranks: int, dtype: torch.dtype | None
) -> list[TensorSpec]:
    """The tensors of a parameter that `ranks` ranks share, from shapes."""
    parameter, is_fp8 = mapped.parameter, dtype is fp8.FP8
    shard = torch.empty(parameter.shape, device="meta")
    wholes = mapped.layout.full([shard] * (ranks if mapped.layout.is_split else 1), hf)
    wanted = parameter.dtype if mapped.keeps_dtype or dtype is None else torch.bfloat16 if is_fp8 else dtype
    specs = []
    for name, whole in zip(names, wholes, strict=True):
        if is_fp8 and _is_quantised(mapped):
            specs.append(TensorSpec(name, tuple(whole.shape), fp8.FP8))
            specs.append(TensorSpec(name + fp8.SUFFIX, fp8.scale_shape(*whole.shape), torch.float32))
        else:
            specs.append(TensorSpec(name, tuple(whole.shape), wanted))
    return specs


def _is_quantised(mapped: Mapped) -> bool:
    """Matrices of layers but the router's, as in checkpoints of DeepSeek-V3."""
    return ".linear_" in mapped.name and mapped.parameter.dim() == 2


def _capacity(sized: Sequence[tuple[Mapped, int]], dtype: torch.dtype | None, bucket_bytes: int) -> int:
    """Bytes of a bucket; see `plan_export`. `sized`: every parameter and how many ranks share it."""
    is_gathered = any(ranks > 1 and mapped.layout.is_split for mapped, ranks in sized)
    leaves = dtype or sized[0][0].parameter.dtype
    travels = sized[0][0].parameter.dtype if leaves is fp8.FP8 else leaves
    gathered = is_gathered * travels.itemsize / leaves.itemsize
    # Parameters that will have a bucket of their own anyway are not counted: all others would get tiny ones.
    assembled = [size for mapped, ranks in sized if (size := _assembly_bytes(mapped, ranks, dtype)) <= bucket_bytes]
    return max(1, int((2 * bucket_bytes - max(assembled, default=0)) / (2 + gathered)))


def _assembly_bytes(mapped: Mapped, ranks: int, dtype: torch.dtype | None) -> int:
    """Memory at most, beside the gathered parts, while a parameter becomes tensors: joined, cut, quantised."""
    parameter, is_joined = mapped.parameter, mapped.layout.is_split and ranks > 1
    whole = parameter.numel() * (ranks if is_joined else 1)
    copies = is_joined + (len(mapped.hf) > 1)
    quantised = (whole + 3 * min(4 * whole, fp8.CHUNK_BYTES)) * (dtype is fp8.FP8 and _is_quantised(mapped))
    return copies * whole * parameter.element_size() + quantised
