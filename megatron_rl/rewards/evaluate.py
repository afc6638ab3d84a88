"""Running all verifiers on one response, in whatever process: values, or the reason why there is none.

What the values add up to is `compose.py`.
"""

from __future__ import annotations

import math
import numbers
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.data.records import PromptRecord

from .registry import Verifier, load_verifier

LARGEST = 1e30
"""Of a verifier's value: a few more digits, and the squares in a standard deviation are infinite."""


@dataclass(frozen=True)
class Outcome:
    """Each component's value in the order of the configuration, NaN where there is none, and by index why not."""

    values: tuple[float, ...]
    errors: Mapping[int, str]


class Evaluator:
    """The loaded verifiers of a run. Raises `RewardError` for one that cannot be loaded."""

    def __init__(self, components: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self._verifiers = [(load_verifier(name, args), dict(args)) for name, args in components]

    def __call__(self, response: str, record: PromptRecord) -> Outcome:
        """Every verifier's value of this response; never raises for what a verifier does."""
        values: list[float] = []
        errors: dict[int, str] = {}
        for index, (function, args) in enumerate(self._verifiers):
            value, error = _call(function, response, record, args)
            values.append(value)
            if error is not None:
                errors[index] = error
        return Outcome(tuple(values), errors)


def _call(function: Verifier, response: str, record: PromptRecord, args: Mapping[str, Any]) -> tuple[float, str | None]:
    try:
        value: Any = function(response, record, **args)
        if not isinstance(value, numbers.Real):
            return math.nan, f"returned {type(value).__name__}, not a number"
        number = float(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a verifier that calls sys.exit must not end the run
        return math.nan, f"raised {last_line(error)}"
    if not math.isfinite(number):
        return math.nan, f"returned {number}"
    if abs(number) > LARGEST:
        return math.nan, f"returned {number:g}, not within -{LARGEST:g} .. {LARGEST:g}"
    return number, None


def last_line(error: BaseException) -> str:
    """The last line of the traceback, with the place where it was raised."""
    text = " ".join(traceback.format_exception_only(error)[-1].split())
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else text
