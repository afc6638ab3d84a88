"""Prompts made by a rule, for the quickstart and tests: digit sorting and countdown; writing them is `quickstart.py`.

Every generator is a pure function of its arguments, gives other prompts for another seed, and keeps training and
evaluation prompts apart by their text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from .records import DataError, PromptRecord

SORTED_TARGETS = 0.25
"""Share of warm-up targets that are right: enough to reward the first samples, too few to learn sorting from."""


@dataclass(frozen=True)
class Prompts:
    """Training and evaluation records, and warm-up records (training prompts with a `target`)."""

    train: list[PromptRecord]
    evaluation: list[PromptRecord]
    sft: list[PromptRecord]


def sort_digits(seed: int, train: int, evaluation: int, sft: int, digits: int = 4) -> Prompts:
    """`3142` is to be answered with `1234`.

    Warm-up targets teach the format: the prompt's digits in a random order, a quarter of them sorted.
    Raises `DataError` when there are not as many different prompts.
    """
    available = 10**digits
    if train + evaluation > available:
        raise DataError(
            f"{train} training and {evaluation} evaluation prompts of {digits} digits: there are only {available}; "
            "ask for fewer prompts or more digits"
        )
    rng = random.Random(f"sort-digits {digits} {seed}")
    records = [_sorting_record(f"{code:0{digits}d}") for code in rng.sample(range(available), train + evaluation)]
    prompts = records[evaluation:]
    targets = [replace(record, target=_sorting_target(record, rng)) for record in _cycle(prompts, sft, rng)]
    return Prompts(prompts, records[:evaluation], targets)


def _sorting_record(text: str) -> PromptRecord:
    return PromptRecord(
        id=f"sort-{text}",
        messages=({"role": "user", "content": text},),
        answer="".join(sorted(text)),
        source=f"sort-{len(text)}-digits",
    )


def _sorting_target(record: PromptRecord, rng: random.Random) -> str:
    assert record.answer is not None
    if rng.random() < SORTED_TARGETS:
        return record.answer
    return "".join(rng.sample(record.answer, len(record.answer)))


def countdown(
    seed: int,
    train: int,
    evaluation: int,
    sft: int,
    numbers: tuple[int, int] = (3, 4),
    max_number: int = 9,
    operators: str = "+-",
    style: Literal["compact", "english"] = "compact",
) -> Prompts:
    """Numbers and a target to reach with them; every puzzle has a solution, a whole target from 1 to 99.

    `numbers` are the least and the most numbers of a puzzle, each between 1 and `max_number`. `style: compact` writes
    `3,5,7>22`, for a tiny model; `english` a full instruction. Warm-up targets are well-formed expressions of the
    puzzle's numbers that mostly miss the target. Raises `DataError` when different prompts run out.
    """
    rng = random.Random(f"countdown {numbers} {max_number} {operators} {seed}")
    wanted = train + evaluation
    records: dict[str, PromptRecord] = {}
    for _ in range(50 * wanted):
        if len(records) == wanted:
            break
        given = [rng.randint(1, max_number) for _ in range(rng.randint(*numbers))]
        target = _reach(rng.sample(given, len(given)), operators, rng)
        if target.denominator == 1 and 1 <= target <= 99:
            record = _countdown_record(len(records), given, int(target), style)
            records.setdefault(record.messages[0]["content"], record)
    else:
        raise DataError(
            f"found only {len(records)} of {wanted} different countdown prompts; ask for fewer prompts, "
            "or for more or larger numbers"
        )
    every = list(records.values())
    prompts = every[evaluation:]
    targets = [replace(record, target=_guess(record, operators, rng)) for record in _cycle(prompts, sft, rng)]
    return Prompts(prompts, every[:evaluation], targets)


_ENGLISH = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations "
    "(+, -, *, /) and each number can only be used once. Show your work in <think> </think> tags. And return the "
    "final equation in <answer> </answer> tags, for example <answer>(1 + 2) / 3</answer>."
)


def _countdown_record(serial: int, given: list[int], target: int, style: str) -> PromptRecord:
    text = ",".join(map(str, given)) + f">{target}"
    if style == "english":
        text = _ENGLISH.format(numbers=given, target=target)
    return PromptRecord(
        id=f"countdown-{serial:06d}",
        messages=({"role": "user", "content": text},),
        answer=str(target),
        source="countdown",
        extra={"numbers": given},
    )


def _reach(order: list[int], operators: str, rng: random.Random) -> Fraction:
    """What the numbers give in this order with random operations, done from left to right."""
    steps: dict[str, Callable[[Fraction, int], Fraction]] = {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "/": lambda a, b: a / b,
    }
    value = Fraction(order[0])
    for number in order[1:]:
        value = steps[rng.choice(operators)](value, number)
    return value


def _guess(record: PromptRecord, operators: str, rng: random.Random) -> str:
    """The record's numbers in random order with random operations between them, in the form of an answer."""
    given = record.extra["numbers"]
    first, *rest = rng.sample(given, len(given))
    expression = str(first) + "".join(f"{rng.choice(operators)}{number}" for number in rest)
    return f"<think></think><answer>{expression}</answer>"


def _cycle(records: list[PromptRecord], count: int, rng: random.Random) -> Iterator[PromptRecord]:
    """`count` records in random order, each used equally often (to within one), with ids of their own."""
    for number in range(count):
        round_, position = divmod(number, len(records))
        if position == 0:
            order = rng.sample(records, len(records))
        record = order[position]
        yield replace(record, id=f"{record.id}-{round_}") if round_ else record
