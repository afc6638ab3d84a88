"""One prompt, and how one line of JSON becomes one; whole files are read in `dataset.py`.

A line is a JSON object:

    {"prompt": "3142", "answer": "1234"}
    {"id": "a-1", "messages": [{"role": "user", "content": "..."}], "answer": "24", "source": "countdown",
     "extra": {"numbers": [3, 5, 7]}, "target": "a response to imitate in the supervised warm-up"}

Reading is strict: a misspelt key would otherwise turn into a reward of 0 that nobody can explain.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

ROLES = ("system", "developer", "user", "assistant", "tool")
KEYS = ("prompt", "messages", "id", "answer", "source", "extra", "target")


class DataError(ValueError):
    """Data that cannot be used. The message names file and line, the key, what is allowed and what to do."""


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One prompt with what its verifier needs.

    `messages` are `{"role": ..., "content": ...}` objects, the last one not from the assistant. `answer` is what
    verifiers compare with, `extra` whatever else one of them needs, `source` names the data set in metrics, and
    `target` is a response to imitate (supervised warm-up only).
    """

    id: str
    messages: tuple[dict[str, str], ...]
    answer: str | None = None
    source: str = "default"
    extra: dict[str, Any] = field(default_factory=dict)
    target: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of a line from which `parse_line` makes an equal record."""
        line: dict[str, Any] = {"id": self.id}
        if len(self.messages) == 1 and self.messages[0]["role"] == "user" and self.messages[0]["content"]:
            line["prompt"] = self.messages[0]["content"]
        else:
            line["messages"] = list(self.messages)
        line["source"] = self.source
        if self.answer is not None:
            line["answer"] = self.answer
        if self.extra:
            line["extra"] = self.extra
        if self.target is not None:
            line["target"] = self.target
        return line


def parse_line(line: bytes, where: str, default_id: str, default_source: str) -> PromptRecord:
    """Make a record of one line of JSON.

    `where` (`file:line`) begins every message. `default_id` and `default_source` are used where the line has none.
    Raises `DataError`.
    """
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON ({error}); every line must be one JSON object") from None
    if not isinstance(value, dict):
        raise DataError(f'{where}: the line is {_kind(value)}; it must be an object such as {{"prompt": "..."}}')
    for key in value:
        if key not in KEYS:
            raise DataError(f"{where}: unknown key {key!r}{_nearest(key)}; allowed are {', '.join(sorted(KEYS))}")
    return PromptRecord(
        id=_optional(value, "id", where, _non_empty_string, '"id": "a-17"') or default_id,
        messages=_messages(value, where),
        answer=_optional(value, "answer", where, _string, '"answer": "24"'),
        source=_optional(value, "source", where, _non_empty_string, '"source": "gsm8k"') or default_source,
        extra=_optional(value, "extra", where, _object, '"extra": {"numbers": [3, 5]}') or {},
        target=_optional(value, "target", where, _non_empty_string, '"target": "1234"'),
    )


def _messages(value: dict[str, Any], where: str) -> tuple[dict[str, str], ...]:
    if ("prompt" in value) == ("messages" in value):
        found = 'both "prompt" and "messages"' if "prompt" in value else 'neither "prompt" nor "messages"'
        raise DataError(f"{where}: has {found}; give exactly one of them")
    if "prompt" in value:
        if not _non_empty_string(value["prompt"]):
            raise DataError(f'{where}: key "prompt" is {_kind(value["prompt"])}; it must be a string that is not empty')
        return ({"role": "user", "content": value["prompt"]},)
    messages = value["messages"]
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{where}: key "messages" is {_kind(messages)}; it must be a list of at least one message')
    parsed = tuple(_message(message, f'{where}: "messages"[{index}]') for index, message in enumerate(messages))
    if parsed[-1]["role"] == "assistant":
        raise DataError(
            f'{where}: the last of "messages" is from the assistant, so there is nothing to answer; '
            'end with a user message, and put a response to imitate into "target"'
        )
    return parsed


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        keys = sorted(message) if isinstance(message, dict) else _kind(message)
        raise DataError(f'{where} has {keys}; it must be an object with exactly "role" and "content"')
    if message["role"] not in ROLES:
        raise DataError(f"{where}: role {message['role']!r} is unknown; allowed are {', '.join(ROLES)}")
    if not isinstance(message["content"], str):
        raise DataError(f'{where}: "content" is {_kind(message["content"])}; it must be a string')
    return {"role": message["role"], "content": message["content"]}


def _optional(value: dict[str, Any], key: str, where: str, allowed: Callable[[Any], bool], example: str) -> Any:
    """`value[key]` if it is allowed; null counts as absent."""
    found = value.get(key)
    if found is None or allowed(found):
        return found
    raise DataError(f'{where}: key "{key}" is {_kind(found)}; write it as in {example}')


def _string(value: Any) -> bool:
    return isinstance(value, str)


def _non_empty_string(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _nearest(key: str) -> str:
    close = difflib.get_close_matches(key, KEYS, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _kind(value: Any) -> str:
    """The JSON name of a value's type, with the value where it is short."""
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    if value is None:
        return "null"
    text = repr(value)
    return names[type(value)] + (f" ({text})" if len(text) <= 40 else "")
