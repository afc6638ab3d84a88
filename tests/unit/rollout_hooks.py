"""Verifiers as the tests of the controller need them. Holds no tests."""

from __future__ import annotations

from megatron_rl.data.records import PromptRecord


def even_count(response: str, record: PromptRecord) -> float:
    """1.0 if an even number of characters comes before `m`: right for about half of all random texts."""
    return float(sum(character < "m" for character in response) % 2 == 0)


def raises(response: str, record: PromptRecord) -> float:
    """Never says anything."""
    raise LookupError(f"no verdict on {record.id}")
