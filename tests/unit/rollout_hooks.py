"""Verifiers as the tests of the controller need them. Holds no tests."""

from __future__ import annotations

import time

from megatron_rl.data.records import PromptRecord


def even_count(response: str, record: PromptRecord) -> float:
    """1.0 if an even number of characters comes before `m`: right for about half of all random texts."""
    return float(sum(character < "m" for character in response) % 2 == 0)


def even_count_slowly(response: str, record: PromptRecord) -> float:
    """`even_count`, in no hurry: a step of some dozen samples takes long enough to be hit in its midst."""
    time.sleep(0.02)
    return even_count(response, record)


def raises(response: str, record: PromptRecord) -> float:
    """Never says anything."""
    raise LookupError(f"no verdict on {record.id}")
