"""Slurm's short form of node names (`gpu[01-03,7],login`) to names. Nothing else of Slurm is known here.

`scontrol show hostnames` does the same, but a container often has no scontrol.
"""

from __future__ import annotations

import itertools
import math
import re

_PART = re.compile(r"([^,\[\]]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")

MOST_NAMES = 65536
"""More than Slurm makes of one name with brackets; a damaged list must not take all memory."""


class NodelistError(ValueError):
    """A text is not a list of nodes; the message says which and where."""


def expand(nodelist: str) -> list[str]:
    """The names in the order in which they stand; a name with several brackets counts its last one up first.

    >>> expand("gpu[08-10,3],login")
    ['gpu08', 'gpu09', 'gpu10', 'gpu3', 'login']
    >>> expand("r[1-2]n[1-2]-ib")
    ['r1n1-ib', 'r1n2-ib', 'r2n1-ib', 'r2n2-ib']

    Raises NodelistError for anything that Slurm would not write.
    """
    names: list[str] = []
    position = 0
    while True:
        part = _PART.match(nodelist, position)
        if part is None:
            raise NodelistError(f"{nodelist!r} is not a list of nodes: a name is expected at character {position + 1}")
        names += _expand_part(part.group(), nodelist)
        position = part.end()
        if position == len(nodelist):
            return names
        if nodelist[position] != ",":
            raise NodelistError(
                f"{nodelist!r} is not a list of nodes: bracket without its other half at {position + 1}"
            )
        position += 1


def _expand_part(part: str, nodelist: str) -> list[str]:
    pieces = re.split(r"\[([^\[\]]*)\]", part)  # text, inside of a bracket, text, inside, ..., text
    choices = [_expand_ranges(piece, nodelist) if i % 2 else [piece] for i, piece in enumerate(pieces)]
    if math.prod(map(len, choices)) > MOST_NAMES:
        raise _too_long(part, nodelist)
    return ["".join(choice) for choice in itertools.product(*choices)]


def _expand_ranges(text: str, nodelist: str) -> list[str]:
    numbers: list[str] = []
    for word in text.split(","):
        bounds = _RANGE.fullmatch(word)
        if bounds is None or int(bounds[2] or bounds[1]) < int(bounds[1]):
            raise NodelistError(f"{nodelist!r} is not a list of nodes: {word!r} is no number and no range of numbers")
        first, last = bounds[1], bounds[2] or bounds[1]
        if len(numbers) + int(last) - int(first) >= MOST_NAMES:
            raise _too_long(text, nodelist)
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def _too_long(part: str, nodelist: str) -> NodelistError:
    return NodelistError(f"{nodelist!r} is not a list of nodes: {part!r} stands for more than {MOST_NAMES} names")
