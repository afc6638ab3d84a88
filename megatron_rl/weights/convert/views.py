"""A checkpoint's tensors under the names of the other format, by a family's table; nothing is read or copied here.

What Megatron's distributed checkpoints call a parameter is said in `stored_names`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from megatron_rl.weights import WeightsError
from megatron_rl.weights.convert.stored_names import Parameter, stored_at
from megatron_rl.weights.convert.tensors import Joined, Part, Rows, blocks
from megatron_rl.weights.families import family_of
from megatron_rl.weights.mapping import Row
from megatron_rl.weights.reader import some_names
from megatron_rl.weights.safetensors_file import FLOATS

if TYPE_CHECKING:
    from megatron_rl.config import HfConfig


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


def check_tied(tensors: Mapping[str, Rows], hf: HfConfig, where: object) -> None:
    """Whether an output layer that is stored beside the embedding to which it is tied is that embedding. Reads both.

    `tensors` have passed `check_hf`.

    Raises:
        WeightsError: it is another one.
    """
    if not hf.tie_word_embeddings:
        return
    family = family_of(hf)
    embedding = tensors[next(iter(family.hf_shapes(hf)))]
    for name in family.tied_names() & tensors.keys():
        if not _are_equal(tensors[name], embedding):
            raise WeightsError(
                f"{where}: {name} is not {embedding.name}, though config.json says tie_word_embeddings=true; set it to "
                f"false if the model has an output layer of its own, or take {name} out of the files"
            )


def _are_equal(first: Rows, second: Rows) -> bool:
    return (first.shape, first.dtype) == (second.shape, second.dtype) and all(
        torch.equal(first.rows(begin, end).view(torch.uint8), second.rows(begin, end).view(torch.uint8))
        for begin, end in blocks(first)
    )


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


def as_megatron(
    tensors: Mapping[str, Rows], hf: HfConfig, padded_vocab_size: int
) -> dict[str, dict[tuple[int, ...], Joined]]:
    """Megatron's whole parameters, by stored name and index there.

    `tensors` have passed `check_hf`.
    """
    found: dict[str, dict[tuple[int, ...], Joined]] = {}
    for row in family_of(hf).rows(hf):
        sources = [tensors[name] for name in row.hf]
        pieces = row.rule.layout.pieces([source.shape[0] for source in sources], hf)
        rows = sum(piece.end - piece.begin for piece in pieces)
        if row.rule.layout.is_padded:
            rows = padded_vocab_size
        dtype = _common_dtype(sources)
        parts = tuple(Part(sources[piece.source], piece.begin, piece.end) for piece in pieces)
        name, index = stored_at(row, hf)
        found.setdefault(name, {})[index] = Joined(name, (rows, *sources[0].shape[1:]), dtype, parts)
    return found


def _common_dtype(tensors: Sequence[Rows]) -> torch.dtype:
    if len({tensor.dtype for tensor in tensors}) > 1:
        listed = ", ".join(f"{tensor.name} {tensor.dtype}" for tensor in tensors)
        raise WeightsError(f"{listed}: Megatron joins these in one parameter; give them one dtype with `convert cast`")
    return tensors[0].dtype


def as_hf(stored: Mapping[Parameter, Rows], hf: HfConfig, where: object) -> dict[str, Joined]:
    """Hugging Face's tensors in the order of the network, from Megatron's whole parameters.

    Raises:
        WeightsError: a parameter is missing, left over, or of another shape than `hf` says.
    """
    rows = {Parameter(row.rule.megatron, row.layer, row.expert): row for row in family_of(hf).rows(hf)}
    if left_over := stored.keys() - rows.keys():
        raise WeightsError(f"{where}: {_why_left_over(left_over, set(rows), hf)}")
    if missing := rows.keys() - stored.keys():
        layers = max((parameter.layer or 0) for parameter in stored) + 1
        if layers < hf.num_layers:
            raise WeightsError(f"{where}: has {layers} layers where config.json says {hf.num_layers}")
        raise WeightsError(
            f"{where}: no {some_names({_described(parameter) for parameter in missing})}; it is another model than "
            "config.json describes, or a part of one"
        )
    shapes = family_of(hf).hf_shapes(hf)
    found: dict[str, Joined] = {}
    for parameter, row in rows.items():
        found |= _split(row, stored[parameter], hf, shapes, where)
    return found


def _why_left_over(left_over: Collection[Parameter], expected: Collection[Parameter], hf: HfConfig) -> str:
    layers = max((parameter.layer or 0) for parameter in left_over) + 1
    if layers > hf.num_layers:
        return f"has {layers} layers where config.json says {hf.num_layers}"
    names = {parameter.name for parameter in expected}
    unknown = {_described(parameter) for parameter in left_over if parameter.name not in names}
    return (
        f"{some_names(unknown or {_described(parameter) for parameter in left_over})} have no row in the table of "
        f"{hf.model_type!r}: another model, or one with parts that are not supported"
    )


def _described(parameter: Parameter) -> str:
    layer = "" if parameter.layer is None else f" of layer {parameter.layer}"
    return f"{parameter.name}{layer}" + ("" if parameter.expert is None else f", expert {parameter.expert}")


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
    padding = Part(whole, position, whole.shape[0]) if position < whole.shape[0] else None
    return {
        name: Joined(
            name, shapes[name], whole.dtype, tuple(part for _, part in sorted(found, key=lambda pair: pair[0])), padding
        )
        for name, found in zip(row.hf, parts, strict=True)
    }
