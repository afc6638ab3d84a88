"""The verifier `exact`: the response is the answer, letter by letter."""

from __future__ import annotations

from megatron_rl.data.records import PromptRecord

from .registry import answer_of


def exact(response: str, record: PromptRecord) -> float:
    """1.0 if response and `record.answer` are equal without surrounding white space, else 0.0."""
    return float(response.strip() == answer_of(record).strip())
