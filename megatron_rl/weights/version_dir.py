"""Writes the policy as a Hugging Face directory that engines load, atomically, and removes old ones; tells no engine.

On disk, below `RUN/weights`:

    v000012/                         a complete Hugging Face directory; it exists under this name or not at all
        model.safetensors            when one bucket holds all; else a file for each bucket and the index:
        model-00001-of-00002.safetensors, ..., model.safetensors.index.json
        config.json                  the source's, with the dtype of the written weights
        tokenizer.json, ...          whatever else the source directory holds beside weights
    .writing-v000012/                what a crash while writing leaves; the next write or prune removes it
    .removing-v000009/               what a crash while removing leaves; likewise
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_rl.files import sync, write_atomic
from megatron_rl.weights import WeightsError
from megatron_rl.weights.buckets import write_safetensors
from megatron_rl.weights.companions import copy_companions
from megatron_rl.weights.export import MIB, ExportPlan, export_buckets, plan_export
from megatron_rl.weights.place import Place
from megatron_rl.weights.reader import INDEX, SINGLE, file_name, index_of
from megatron_rl.weights.safetensors_file import read_header

if TYPE_CHECKING:
    from megatron_rl.config import HfConfig

_WRITING, _REMOVING = ".writing-", ".removing-"
_VERSION = re.compile(r"v(\d{6,})")


def version_path(weights_dir: Path, version: int) -> Path:
    """`weights_dir`/v000012 for version 12."""
    return weights_dir / f"v{version:06d}"


def write_version(
    chunks: Sequence[Any],
    hf: HfConfig,
    source_dir: Path,
    out_dir: Path,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = 512 * MIB,
) -> Path:
    """Write this policy to `out_dir`; collective over all ranks. An existing `out_dir` is replaced.

    The first rank of each pipeline stage (`Place.sends`) writes the stage's files, one after the other, global rank 0
    all else. All ranks see the same file system. When any rank fails, all raise and `out_dir` does not change. Memory:
    see `plan_export`.

    Args:
        chunks: this rank's model chunks, bare or wrapped, with up-to-date parameters.
        source_dir: where config.json, the tokenizer and generation settings are copied from.
        out_dir: usually `version_path(...)`; its parent is created.
        dtype: see `plan_export`.
        bucket_bytes: about how large a file is.

    Returns:
        `out_dir`, complete and durable.

    Raises:
        WeightsError: some rank could not write (disk full, permissions); the cause is chained on that rank.
    """
    place = Place.of_this_rank()
    writing = out_dir.with_name(_WRITING + out_dir.name)
    is_main = dist.get_rank() == 0
    plan = plan_export(chunks, hf, dtype, bucket_bytes)
    with _all_or_nothing(f"prepare {writing}", plan.device):
        if is_main:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
    counts = _files_of_each_stage(plan, place)
    with _all_or_nothing(f"write {writing}", plan.device):
        if place.exports:
            _write_stage(plan, place, counts, writing)
    with _all_or_nothing(f"complete {out_dir}", plan.device):
        if is_main:
            _write_index(writing)
            copy_companions(source_dir, writing, dtype or next(chunks[0].parameters()).dtype)
            sync(writing)
            _move_into_place(writing, out_dir)
    return out_dir


@contextmanager
def _all_or_nothing(what: str, device: torch.device) -> Iterator[None]:
    """A phase after which all ranks go on, or all raise: no rank waits for one that has failed."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    failed = torch.tensor([0 if error is None else dist.get_rank() + 1], device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if error is not None:
        hint = "; free space or fix permissions, then resume" if isinstance(error, OSError) else ""
        raise WeightsError(f"could not {what}: {error}{hint}") from error
    if failed.item():
        raise WeightsError(f"could not {what}: rank {int(failed) - 1} failed, see its log")


def _files_of_each_stage(plan: ExportPlan, place: Place) -> list[int]:
    """How many files every pipeline stage writes. Collective over all ranks."""
    counts = torch.zeros(place.stages, dtype=torch.int64, device=plan.device)
    if place.sends:
        counts[place.stage] = len(plan.parcels)
    dist.all_reduce(counts)
    return counts.tolist()


def _write_stage(plan: ExportPlan, place: Place, counts: Sequence[int], writing: Path) -> None:
    """A file for each bucket. A rank that does not write takes part in the gathering."""
    first, total = sum(counts[: place.stage]), sum(counts)
    for number, (bucket, flat) in enumerate(export_buckets(plan, "cpu" if place.sends else None, place), first + 1):
        if flat is not None:
            write_safetensors(writing / file_name(number, total), bucket, flat)


def _write_index(writing: Path) -> None:
    files = sorted(writing.glob("*.safetensors"))
    if [file.name for file in files] == [SINGLE]:
        return
    weight_map: dict[str, str] = {}
    total = 0
    for file in files:
        tensors = read_header(file)
        weight_map |= dict.fromkeys(tensors, file.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    write_atomic(writing / INDEX, index_of(weight_map, total))


def _move_into_place(writing: Path, out_dir: Path) -> None:
    if out_dir.exists():
        _remove(out_dir)
    os.replace(writing, out_dir)
    sync(out_dir.parent)


def _remove(path: Path) -> None:
    """Remove a directory so that a crash leaves no half of it under its name."""
    removing = path.with_name(_REMOVING + path.name)
    shutil.rmtree(removing, ignore_errors=True)
    os.replace(path, removing)
    shutil.rmtree(removing)


def list_versions(weights_dir: Path) -> list[tuple[int, Path]]:
    """All complete versions below `weights_dir`, oldest first."""
    if not weights_dir.is_dir():
        return []
    matches = [(_VERSION.fullmatch(path.name), path) for path in weights_dir.iterdir() if path.is_dir()]
    return sorted((int(match[1]), path) for match, path in matches if match)


def discard_versions_after(weights_dir: Path, version: int) -> None:
    """Remove versions newer than `version`, to which the run was restored: they will be written again."""
    for newer, path in list_versions(weights_dir):
        if newer > version:
            _remove(path)


def prune_versions(weights_dir: Path, keep: int, in_use: Collection[int] = ()) -> None:
    """Remove all but the newest `keep` (1 or more) versions and those in `in_use`; and what crashes have left.

    One caller only.
    """
    for version, path in list_versions(weights_dir)[:-keep]:
        if version not in in_use:
            _remove(path)
    for path in [*weights_dir.glob(f"{_WRITING}*"), *weights_dir.glob(f"{_REMOVING}*")]:
        shutil.rmtree(path, ignore_errors=True)
