"""Fills Megatron model chunks from a Hugging Face directory: each rank reads its own slices, without communication.

Whether its weights fit its config.json is found out here as well, from headers alone: before a run, and by every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from megatron_rl.weights import WeightsError, fp8
from megatron_rl.weights.convert.views import check_hf
from megatron_rl.weights.families import family_of
from megatron_rl.weights.finite import is_finite
from megatron_rl.weights.layouts import Shard
from megatron_rl.weights.mapping import Mapped, mapped_parameters
from megatron_rl.weights.reader import SafetensorsReader
from megatron_rl.weights.safetensors_file import TensorOnDisk

if TYPE_CHECKING:
    from megatron_rl.config import HfConfig

Stored = TensorOnDisk | fp8.Dequantised


@torch.no_grad()
def load_hf_weights(chunks: Sequence[Any], hf: HfConfig, path: str | Path) -> None:
    """Load `path`/*.safetensors into this rank's chunks (with or without data-parallel wrapper).

    Values are converted to the parameters' dtype; matrices in blocks of fp8 (`fp8`) by way of fp32. All ranks check the
    whole checkpoint before anything is read.

    Raises:
        WeightsError: as `open_hf_weights`; unmapped parameters, numbers that are not finite (of those that this rank
            holds).
    """
    from megatron.core import parallel_state

    sources, path = open_hf_weights(hf, path), Path(path)
    dense = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    expert = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
    for chunk in chunks:
        for mapped in mapped_parameters(chunk, family_of(hf), hf):
            rank, size = dense if mapped.expert is None else expert
            shard = Shard(rank, size, mapped.parameter.shape[0])
            _load(mapped, [sources[name] for name in mapped.hf], path, shard, hf)


def open_hf_weights(hf: HfConfig, path: str | Path) -> dict[str, Stored]:
    """Every tensor of `path`/*.safetensors by name, matrices in blocks of fp8 (`fp8`) as such, after a look at headers.

    Every tensor of the checkpoint must belong to the model and every one of the model must be there; no numbers are
    read.

    Raises:
        WeightsError: unreadable files, missing or left-over tensors, shapes that differ from config.json's, other
            numbers than floating point.
    """
    reader = SafetensorsReader(path)
    sources: dict[str, Stored] = {name: reader[name] for name in reader.names}
    for name in fp8.names_in_blocks(reader.names):
        sources[name] = fp8.Dequantised(reader[name], sources.pop(name + fp8.SUFFIX))
    check_hf(sources, hf, reader.path)
    return sources


def _load(mapped: Mapped, sources: Sequence[Stored], path: Path, shard: Shard, hf: HfConfig) -> None:
    local = mapped.layout.local(sources, shard, hf)
    if local.shape != mapped.parameter.shape:
        raise WeightsError(
            f"{path}: {', '.join(mapped.hf)} give {list(local.shape)} where {mapped.name!r} needs "
            f"{list(mapped.parameter.shape)}; the table of {hf.model_type!r} is wrong: correct it"
        )
    mapped.parameter.copy_(local)
    if not is_finite(mapped.parameter):  # where the parameter is: far faster than what was read
        raise WeightsError(_not_finite(mapped, sources, path))


def _not_finite(mapped: Mapped, sources: Sequence[Stored], path: Path) -> str:
    """Which tensors, in which files; they are read once more, whole."""
    files = {
        source.name: (source if isinstance(source, TensorOnDisk) else cast(TensorOnDisk, source.values)).file
        for source in sources
        if not torch.isfinite(source.rows(0, source.shape[0]).float()).all()
    }
    if not files:
        dtype = str(mapped.parameter.dtype).removeprefix("torch.")
        names = ", ".join(source.name for source in sources)
        return f"{path}: {names} holds numbers that are too large for {dtype}; choose another model.dtype"
    listed = ", ".join(f"{name} in {file.name}" for name, file in files.items())
    return f"{path}: {listed} holds NaN or infinity; get the model again, or choose another checkpoint of it"
