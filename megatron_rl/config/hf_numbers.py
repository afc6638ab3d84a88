"""Numbers of a config.json, checked one by one; which of them a model has is in `hf_config` and `hf_experts`."""

from __future__ import annotations

from typing import Any, TypeVar

N = TypeVar("N", int, float)


def given(values: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that are null, which means absent."""
    return {key: value for key, value in values.items() if value is not None}


def positive(values: dict[str, Any], key: str, kind: type[N] = int) -> N:
    """The number under `key`. Raises KeyError when it is missing, ValueError for anything but a positive number."""
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or not value > 0:
        raise ValueError(f"{key}={value!r} is not a positive {'whole ' if kind is int else ''}number")
    return kind(value)
