"""The verifier `math`: the last `\\boxed{...}` of a response against the answer, as mathematics (math-verify, sympy).

Runs in a worker process only: on hostile input sympy can compute without end, and math-verify's own time limits need
signals in the main thread; the pool kills the process instead. What math-verify counts as equal has surprises: 50% and
50, and {1,2} and (1,2) are equal to it, 0.333 and 1/3 are not.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from megatron_rl.data.records import PromptRecord

from .registry import answer_of

# It warns at every call that it has no time limit; that is on purpose (see above).
logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_LENGTH = 1000
"""Characters of a boxed answer; a longer one is wrong without being parsed."""


def math(response: str, record: PromptRecord) -> float:
    """1.0 if the last complete `\\boxed{...}` of the response equals `record.answer`, else 0.0.

    The answer is LaTeX or plain text, with or without `$` or a box of its own. Raises `ValueError` for an answer that
    math-verify cannot read.
    """
    predicted, expected = last_boxed(response), _bare(answer_of(record))
    if predicted is None or len(predicted) > MAX_LENGTH:
        return 0.0
    if predicted.strip() == expected:
        return 1.0
    gold = _parse_answer(expected)
    if not gold:
        raise ValueError(f"record {record.id!r}: answer {expected!r} cannot be read as mathematics; correct the data")
    # No time limit here (it would need SIGALRM): the pool has one.
    return float(verify(list(gold), _parse_boxed(predicted), timeout_seconds=None))


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{...}` whose brackets are complete, or None."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        begin = start + len("\\boxed{")
        depth, position = 1, begin
        while position < end:
            if text[position] == "\\":
                position += 1  # an escaped bracket, as of a set, opens no group
            else:
                depth += (text[position] == "{") - (text[position] == "}")
            if depth == 0:
                return text[begin:position]
            position += 1
        end = start
    return None


def _bare(answer: str) -> str:
    boxed = last_boxed(answer)
    return (answer if boxed is None else boxed).strip().strip("$").strip()


@lru_cache(maxsize=1024)  # the same answer is compared with every sample of its group
def _parse_answer(answer: str) -> tuple[Any, ...]:
    return tuple(_parse_boxed(answer))


def _parse_boxed(text: str) -> list[Any]:
    config = LatexExtractionConfig(boxed_match_priority=0)
    return parse(f"\\boxed{{{text}}}", extraction_config=[config], parsing_timeout=None)
