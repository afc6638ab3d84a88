"""Verifiers that compare letter by letter: `exact`, and `sorting` and `sorting_format` of the digit-sorting task."""

from __future__ import annotations

from megatron_rl.data.records import PromptRecord

from .registry import answer_of


def exact(response: str, record: PromptRecord) -> float:
    """1.0 if response and `record.answer` are equal without surrounding white space, else 0.0."""
    return float(response.strip() == answer_of(record).strip())


def sorting(response: str, record: PromptRecord) -> float:
    """1.0 if the response is exactly the sorted digits (`record.answer`), else 0.0; a space more is wrong."""
    return float(response == answer_of(record))


def sorting_format(response: str, record: PromptRecord) -> float:
    """1.0 if the response is as many ASCII digits as the answer and nothing else, in whatever order, else 0.0."""
    return float(len(response) == len(answer_of(record)) and response.isascii() and response.isdigit())
