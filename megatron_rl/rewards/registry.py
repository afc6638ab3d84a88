"""Names to verifiers: the table of built-in ones and the hook `module:function`; running them is `evaluate.py`.

A verifier is `def verify(response: str, record: PromptRecord, **args) -> float`. It is a pure function of what it is
given; it may raise, hang or return NaN, and then its sample is left out of training.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megatron_rl.data.records import PromptRecord


class RewardError(RuntimeError):
    """Rewards cannot be computed. The message names the verifier, what happened and what to do."""


Verifier = Callable[..., float]


@dataclass(frozen=True)
class BuiltIn:
    """Where a verifier lives. `inline_safe`: quick on any input whatever, so it needs no process of its own."""

    location: str
    inline_safe: bool
    needs_answer: bool = True
    """Raises for a record without `answer`."""


BUILT_IN = {
    "countdown": BuiltIn("megatron_rl.rewards.countdown:countdown", inline_safe=True),
    "countdown_format": BuiltIn("megatron_rl.rewards.countdown:countdown_format", inline_safe=True, needs_answer=False),
    "environment": BuiltIn("megatron_rl.rewards.from_environment:environment", inline_safe=True, needs_answer=False),
    "exact": BuiltIn("megatron_rl.rewards.exact:exact", inline_safe=True),
    "math": BuiltIn("megatron_rl.rewards.boxed_math:math", inline_safe=False),
    "sorting": BuiltIn("megatron_rl.rewards.exact:sorting", inline_safe=True),
    "sorting_format": BuiltIn("megatron_rl.rewards.exact:sorting_format", inline_safe=True),
}


def is_inline_safe(name: str) -> bool:
    """Whether the verifier may run in the controller itself; a hook may not."""
    return name in BUILT_IN and BUILT_IN[name].inline_safe


def required_keys(names: Iterable[str]) -> tuple[str, ...]:
    """Keys that every record must have for these verifiers; functions of a user's own look for themselves."""
    return ("answer",) if any(name in BUILT_IN and BUILT_IN[name].needs_answer for name in names) else ()


def check_name(name: str) -> None:
    """Raise `RewardError` for a name neither in the table nor of the form `module:function`; imports nothing."""
    if name in BUILT_IN:
        return
    module, separator, function = name.partition(":")
    if separator and module and function:
        return
    close = difflib.get_close_matches(name, BUILT_IN, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise RewardError(
        f"reward component {name!r} is unknown{hint}; allowed are {', '.join(BUILT_IN)}, "
        "and module:function for a function of your own"
    )


def load_verifier(name: str, args: Mapping[str, Any]) -> Verifier:
    """The function of a component, imported now, and checked to take `(response, record, **args)`.

    Raises `RewardError` when it cannot be imported, is no function, or takes other arguments.
    """
    check_name(name)
    module_name, _, function_name = (BUILT_IN[name].location if name in BUILT_IN else name).partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # whatever the module of a user does on import
        raise RewardError(
            f"reward component {name!r}: module {module_name!r} cannot be imported ({type(error).__name__}: {error}); "
            "it must be installed, or lie in a directory named in PYTHONPATH"
        ) from error
    function = getattr(module, function_name, None)
    if function is None:
        raise RewardError(
            f"reward component {name!r}: module {module_name!r} ({module.__file__}) has no {function_name!r}"
        )
    if not callable(function):
        raise RewardError(f"reward component {name!r}: {function_name!r} is {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"reward component {name!r}: {function_name!r} is async; it must be a plain function")
    _check_signature(name, function, args)
    return function


def _check_signature(name: str, function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # written in C: called as it is
    try:
        signature.bind("", PromptRecord("id", ({"role": "user", "content": ""},)), **args)
    except TypeError as error:
        raise RewardError(
            f"reward component {name!r}: its function is {function.__name__}{signature} and cannot be called as "
            f"(response, record{''.join(f', {key}=...' for key in args)}): {error}; write "
            "def verify(response: str, record: PromptRecord, **args) -> float, or correct the component's args"
        ) from None


def answer_of(record: PromptRecord) -> str:
    """The record's answer. Raises `ValueError` if it has none."""
    if record.answer is None:
        raise ValueError(f'record {record.id!r} has no "answer"; this verifier needs one in every line')
    return record.answer
