"""A checkpoint's tensors under the names of the other format, by a family's table; nothing is read or copied here.

Megatron's whole parameters carry the names under which its distributed checkpoints store them: a parameter of the
layers is one tensor with the layers as first dimension, and the norms are named as Transformer Engine fuses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from megatron_rl.weights import WeightsError
from megatron_rl.weights.convert.tensors import Joined, Part, Rows
from megatron_rl.weights.families import family_of
from megatron_rl.weights.mapping import FUSED_NORMS, Row
from megatron_rl.weights.reader import some_names
from megatron_rl.weights.safetensors_file import FLOATS

if TYPE_CHECKING:
    from megatron_rl.config import HfConfig

LAYERS = "decoder.layers."
_STORED = {local: fused for fused, local in FUSED_NORMS.items()}
Stored = Mapping[str, Sequence[Rows]]
"""By name: the tensor, or one for each layer."""


def stored_name(row: Row) -> str:
    """The name of a parameter in a distributed checkpoint."""
    name = row.rule.megatron
    return name if row.layer is None else LAYERS + _STORED.get(name, name)


def check_hf(tensors: Mapping[str, Rows], hf: HfConfig, where: object) -> None:
    """Whether these are the tensors of the model that `hf` describes: names, shapes, dtypes.

    Raises:
        WeightsError: a tensor is missing, left over, of another shape, or not of floating point.
    """
    family, expected = family_of(hf), family_of(hf).hf_shapes(hf)
    if missing := expected.keys() - tensors.keys():
        raise WeightsError(
            f"{where}: {some_names(set(missing))} missing; config.json and weights do not belong together, or a file "
            "was not copied"
        )
    if left_over := {name for name in tensors.keys() - expected.keys() if not family.ignores(name, hf)}:
        raise WeightsError(
            f"{where}: {some_names(left_over)} have no place in a {family.model_type!r} model as config.json "
            "describes it; the two do not belong together, or the model has parts that are not supported"
        )
    for name, shape in expected.items():
        _check(tensors[name], shape, where)


def _check(tensor: Rows, shape: tuple[int, ...], where: object) -> None:
    if tensor.shape != shape:
        raise WeightsError(
            f"{where}: {tensor.name} has shape {list(tensor.shape)} where config.json says {list(shape)}; the two do "
            "not belong together"
        )
    if tensor.dtype not in FLOATS:
        raise WeightsError(
            f"{where}: {tensor.name} has dtype {str(tensor.dtype).removeprefix('torch.')}; weights must be one of "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in FLOATS)}: dequantise the model first"
        )


def as_megatron(tensors: Mapping[str, Rows], hf: HfConfig, padded_vocab_size: int) -> dict[str, list[Joined]]:
    """Megatron's whole parameters, by stored name: one tensor, or one for each layer.

    `tensors` have passed `check_hf`.
    """
    found: dict[str, list[Joined]] = {}
    for row in family_of(hf).rows(hf):
        sources = [tensors[name] for name in row.hf]
        pieces = row.rule.layout.pieces([source.shape[0] for source in sources], hf)
        rows = sum(piece.end - piece.begin for piece in pieces)
        if row.rule.layout.is_padded:
            rows = padded_vocab_size
        dtype = _common_dtype(sources)
        parts = tuple(Part(sources[piece.source], piece.begin, piece.end) for piece in pieces)
        name = stored_name(row)
        found.setdefault(name, []).append(Joined(name, (rows, *sources[0].shape[1:]), dtype, parts))
    return found


def _common_dtype(tensors: Sequence[Rows]) -> torch.dtype:
    if len({tensor.dtype for tensor in tensors}) > 1:
        listed = ", ".join(f"{tensor.name} {tensor.dtype}" for tensor in tensors)
        raise WeightsError(f"{listed}: Megatron joins these in one parameter; give them one dtype with `convert cast`")
    return tensors[0].dtype


def as_hf(tensors: Stored, hf: HfConfig, where: object) -> dict[str, Joined]:
    """Hugging Face's tensors in the order of the network, from Megatron's whole parameters by stored name.

    Raises:
        WeightsError: a parameter is missing, left over, or of another shape than `hf` says.
    """
    rows = list(family_of(hf).rows(hf))
    if left_over := tensors.keys() - {stored_name(row) for row in rows}:
        raise WeightsError(
            f"{where}: {some_names(set(left_over))} have no row in the table of {hf.model_type!r}: another model, or "
            "one with parts that are not supported"
        )
    shapes = family_of(hf).hf_shapes(hf)
    found: dict[str, Joined] = {}
    for row in rows:
        found |= _split(row, _stored(tensors, row, hf, where), hf, shapes, where)
    return found


def _stored(tensors: Stored, row: Row, hf: HfConfig, where: object) -> Rows:
    name, layer = stored_name(row), row.layer or 0
    if name not in tensors:
        raise WeightsError(f"{where}: no {name}; it is another model than config.json describes, or a part of one")
    count = hf.num_layers if row.layer is not None else 1
    if len(tensors[name]) != count:
        raise WeightsError(f"{where}: {name} has {len(tensors[name])} layers where config.json says {count}")
    return tensors[name][layer]


def _split(
    row: Row, whole: Rows, hf: HfConfig, shapes: Mapping[str, tuple[int, ...]], where: object
) -> dict[str, Joined]:
    counts = [shapes[name][0] for name in row.hf]
    expected = (sum(counts), *shapes[row.hf[0]][1:])
    if row.rule.layout.is_padded and whole.shape[0] >= expected[0]:
        expected = (whole.shape[0], *expected[1:])
    _check(whole, expected, where)
    parts: list[list[tuple[int, Part]]] = [[] for _ in row.hf]
    position = 0
    for piece in row.rule.layout.pieces(counts, hf):
        end = position + piece.end - piece.begin
        parts[piece.source].append((piece.begin, Part(whole, position, end)))
        position = end
    return {
        name: Joined(
            name, shapes[name], whole.dtype, tuple(part for _, part in sorted(found, key=lambda pair: pair[0]))
        )
        for name, found in zip(row.hf, parts, strict=True)
    }
