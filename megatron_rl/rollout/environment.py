"""What an environment is, and loading the one of a run; it is called by `turns.py`, in a process of `episodes.py`.

class Environment:
    role = "tool"                                  # of its messages; "user" when absent
    def __init__(self, **environment_args): ...
    def reset(self, record: PromptRecord) -> str | None: ...       # None, or a message that ends the prompt
    def step(self, text: str) -> tuple[str, bool, float | None]: ...  # answer to a turn, done, reward
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

from megatron_rl.config import ConfigError
from megatron_rl.data import PromptRecord

DEFAULT_ROLE = "user"
MAX_CHARACTERS = 100_000
"""Of one message: many times what fits a response, little enough to be tokenised between two requests."""
LARGEST_REWARD = 1e30


class EnvironmentFailed(Exception):
    """An environment raised, hung, died or answered nonsense: its sample cannot be judged. The text says which."""


class Environment(Protocol):
    """One conversation; every sample has an instance of its own."""

    def reset(self, record: PromptRecord) -> str | None:
        """Begin. A text becomes one more message of the prompt; it must be the same for all samples of a record."""

    def step(self, text: str) -> tuple[str | None, bool, float | None]:
        """The model's turn -> (message that answers it, whether the conversation is over, reward of this turn)."""


@dataclass(frozen=True)
class Step:
    """What an environment answered to one turn."""

    observation: str
    done: bool
    reward: float | None


def load_environment(name: str, args: Mapping[str, Any]) -> type[Environment]:
    """The class `module:Class`, imported now, and checked to be made of `args` and to have both methods.

    Raises:
        ConfigError: it cannot be imported, is no class, takes other arguments, lacks a method or has an async one.
    """
    key = f"rollout.environment={name!r}"
    module_name, _, class_name = name.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # whatever the module of a user does on import
        raise ConfigError(
            f"{key}: module {module_name!r} cannot be imported ({type(error).__name__}: {error}); "
            "it must be installed, or lie in a directory named in PYTHONPATH"
        ) from error
    found = getattr(module, class_name, None)
    if not inspect.isclass(found):
        what = "has no" if found is None else f"has a {type(found).__name__}, not a class,"
        raise ConfigError(f"{key}: module {module_name!r} ({module.__file__}) {what} {class_name!r}")
    _bind(f"{key}: {class_name}", found, (), dict(args), "with rollout.environment_args")
    record = PromptRecord("id", ({"role": "user", "content": ""},))
    for method, argument in (("reset", record), ("step", "")):
        function = getattr(found, method, None)
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise ConfigError(f"{key}: {class_name} needs a plain method {method}; see docs/environments.md")
        _bind(f"{key}: {class_name}.{method}", function, (None, argument), {}, "with one argument")
    return cast(type[Environment], found)


def _bind(what: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], how: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # written in C: called as it is
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = f" {kwargs}" if kwargs else ""
        raise ConfigError(f"{what}{signature} cannot be called {how}{given}: {error}") from None


def role_of(environment: type[Environment]) -> str:
    """Role of its messages in the chat template."""
    return str(getattr(environment, "role", DEFAULT_ROLE))


def read_opening(answer: Any) -> str | None:
    """What `reset` returned. Raises EnvironmentFailed when it is neither None nor a text."""
    return None if answer is None else _text(answer, "reset")


def read_step(answer: Any) -> Step:
    """What `step` returned. Raises EnvironmentFailed when it is no (text, bool, number or None)."""
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        raise EnvironmentFailed(f"step returned {_short(answer)}; it must be (observation, done, reward)")
    observation, done, reward = answer
    if not isinstance(done, bool):
        raise EnvironmentFailed(f"step returned done={_short(done)}; it must be a bool")
    if reward is not None:
        known = float(reward) if isinstance(reward, numbers.Real) else math.nan
        if not abs(known) <= LARGEST_REWARD:
            raise EnvironmentFailed(f"step returned reward={_short(reward)}; it must be a finite number or None")
        reward = known
    return Step("" if observation is None else _text(observation, "step"), done, reward)


def _text(value: Any, method: str) -> str:
    if not isinstance(value, str):
        raise EnvironmentFailed(f"{method} returned an observation of type {type(value).__name__}, not str")
    if len(value) > MAX_CHARACTERS:
        raise EnvironmentFailed(f"{method} returned {len(value)} characters; at most {MAX_CHARACTERS} are allowed")
    return value


def _short(value: Any) -> str:
    return repr(value)[:80]
