"""The verifiers `countdown` and `countdown_format`: an expression of given numbers that reaches a target.

The expression comes from a model and may be anything. It is parsed into a syntax tree and walked here; nothing of it
is ever evaluated by Python.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from megatron_rl.data.records import PromptRecord

from .registry import answer_of

MAX_LENGTH = 256
"""Characters of an expression; ten numbers with brackets need fewer than 100."""
MAX_DEPTH = 32
"""Nested brackets; more than any useful expression has, far below what exhausts Python's parser."""
# ASCII only: str.isdigit and int() would also take digits of other scripts.
_ALLOWED = re.compile(r"[0-9+\-*/() ]+", re.ASCII)
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def countdown_format(response: str, record: PromptRecord) -> float:
    """How well the response keeps to `<think>..</think> <answer>..</answer>`.

    1.0: exactly one of each pair, in this order, with nothing but white space before, between and after.
    Else 0.5 for an answer pair plus 0.1 for a think pair.
    """
    if _is_exact_format(response):
        return 1.0
    return 0.5 * _has_pair(response, "answer") + 0.1 * _has_pair(response, "think")


def countdown(response: str, record: PromptRecord) -> float:
    """1.0 if the last `<answer>..</answer>` uses each of `extra.numbers` exactly once and equals `answer`, else 0.0.

    Allowed are whole numbers, `+ - * /` between two operands, and round brackets; arithmetic is exact. Raises
    `ValueError` for a record without numbers or without a whole target.
    """
    numbers, target = _puzzle(record)
    text = _last_answer(response)
    used: list[int] = []
    return float(text is not None and value_of(text, used) == target and sorted(used) == sorted(numbers))


def value_of(text: str, used: list[int] | None = None) -> Fraction | None:
    """What an expression of whole numbers, `+ - * /` and round brackets gives, exactly; None for any other text.

    Its numbers are added to `used`.

    >>> value_of("(3 + 4) / 2"), value_of("2 ** 9"), value_of("1 / 0")
    (Fraction(7, 2), None, None)
    """
    text = text.strip()
    if len(text) > MAX_LENGTH or not _ALLOWED.fullmatch(text) or _depth(text) > MAX_DEPTH:
        return None
    try:
        return _value(ast.parse(text, mode="eval").body, [] if used is None else used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _is_exact_format(response: str) -> bool:
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    if any(response.count(tag) != 1 for tag in tags):
        return False
    think, think_end, answer, answer_end = (response.index(tag) for tag in tags)
    if not think < think_end < answer < answer_end:
        return False
    outside = (
        response[:think],
        response[think_end + len(tags[1]) : answer],
        response[answer_end + len(tags[3]) :],
    )
    return not any(part.strip() for part in outside)


def _has_pair(response: str, tag: str) -> bool:
    start = response.find(f"<{tag}>")
    return start >= 0 and response.find(f"</{tag}>", start) >= 0


def _last_answer(response: str) -> str | None:
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, max(end, 0))
    return response[start + len("<answer>") : end] if start >= 0 else None


def _puzzle(record: PromptRecord) -> tuple[list[int], int]:
    numbers = record.extra.get("numbers")
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise ValueError(f'record {record.id!r}: countdown needs "extra": {{"numbers": [3, 5, 7]}} in its line')
    try:
        return numbers, int(answer_of(record))
    except ValueError:
        raise ValueError(f'record {record.id!r}: countdown needs a whole number as "answer", such as "24"') from None


def _depth(text: str) -> int:
    deepest = depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Raises ValueError for a tree that holds anything but numbers and the four operations."""
    match node:
        case ast.Constant(value=int() as number):
            used.append(number)
            return Fraction(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left, used), _value(right, used))
    raise ValueError(f"{type(node).__name__} has no place in an expression")
