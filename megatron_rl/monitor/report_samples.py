"""Chooses which samples a report shows and cuts them to a bounded size; how they are laid out is in the template.

Steps are spread evenly over the run (first and last included), groups evenly over the mean rewards of a step, samples
evenly over the rewards of a group: a page of bounded size still shows easy and hard prompts, and for each of them good
and bad answers side by side, from the beginning of a run to its end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

T = TypeVar("T")

MAX_PROMPT = 4000
MAX_RESPONSE = 8000
"""Characters shown of a text; a longer one loses its middle."""

_TEXTS = ("prompt", "response", "answer")
_IDS = ("sample_id", "group_id", "prompt_id", "source", "finish_reason")
_NUMBERS = ("reward", "correctness", "log_prob_mean", "gap_max_abs")
_COUNTS = ("response_tokens", "trained", "weight_version_first", "weight_version_last")
_COLUMNS = (*_TEXTS, *_IDS, *_NUMBERS, *_COUNTS, "components")


def collect_samples(
    dumps: dict[int, Path], max_steps: int, samples_per_step: int, notes: list[str]
) -> list[dict[str, Any]]:
    """`[{step, total, mean, samples: [...]}]` for steps spread over the run; unreadable dumps are named in `notes`."""
    steps = []
    for step in spread(sorted(dumps), max_steps):
        try:
            rows = _read(dumps[step])
        except (OSError, pa.ArrowException) as error:
            notes.append(f"{dumps[step].name} in {dumps[step].parent.name}/ could not be read ({error}); left out")
            continue
        if rows:
            steps.append(_step(step, rows, samples_per_step))
    return steps


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` items at even distances, the first and the last among them.

    >>> spread(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(items) <= count:
        return list(items)
    if count <= 1:
        return list(items[-count:]) if count else []
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _read(path: Path) -> list[dict[str, Any]]:
    present = [name for name in pq.read_schema(path).names if name in _COLUMNS]
    rows: list[dict[str, Any]] = pq.read_table(path, columns=present).to_pylist()
    return rows


def _step(step: int, rows: list[dict[str, Any]], count: int) -> dict[str, Any]:
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row.get("group_id"), []).append(row)
    known = [reward for row in rows if (reward := _number(row.get("reward"))) is not None]
    return {
        "step": step,
        "total": len(rows),
        "mean": sum(known) / len(known) if known else None,
        "samples": [_sample(row, group) for group, chosen in _choose(list(groups.values()), count) for row in chosen],
    }


Rows = list[dict[str, Any]]


def _choose(groups: list[Rows], count: int) -> list[tuple[Rows, Rows]]:
    """About sqrt(count) groups (more when groups are small) and what is shown of each, at most `count` rows in all."""
    largest = max(len(group) for group in groups)
    number = min(len(groups), max(math.ceil(math.sqrt(count)), math.ceil(count / largest)))
    order = spread(sorted(range(len(groups)), key=lambda i: (_mean_reward(groups[i]), i)), number)
    shares = [count // number + (i < count % number) for i in range(number)]
    return [
        (groups[index], spread(sorted(groups[index], key=_reward), share))
        for index, share in zip(sorted(order), shares, strict=True)
    ]


def _reward(row: dict[str, Any]) -> float:
    reward = _number(row.get("reward"))
    return -math.inf if reward is None else reward


def _mean_reward(group: Rows) -> float:
    return sum(_reward(row) for row in group) / len(group)


def _sample(row: dict[str, Any], group: list[dict[str, Any]]) -> dict[str, Any]:
    correct = [value for other in group if (value := _number(other.get("correctness"))) is not None]
    return {
        **{name: row.get(name) for name in (*_IDS, *_COUNTS)},
        **{name: _number(row.get(name)) for name in _NUMBERS},
        "prompt": _cut(row.get("prompt"), MAX_PROMPT),
        "response": _cut(row.get("response"), MAX_RESPONSE),
        "answer": _cut(row.get("answer"), MAX_PROMPT),
        "components": _components(row.get("components")),
        "group_size": len(group),
        "group_correct": sum(value > 0.5 for value in correct) if correct else None,
    }


def _components(text: Any) -> dict[str, float | None]:
    try:
        loaded = json.loads(text) if isinstance(text, str) else {}
    except json.JSONDecodeError:
        return {}
    return {str(name): _number(value) for name, value in loaded.items()} if isinstance(loaded, dict) else {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _cut(text: Any, limit: int) -> str:
    """At most `limit` characters: three quarters from the beginning, the rest from the end, the gap named between."""
    text = "" if text is None else str(text)
    if len(text) <= limit:
        return text
    head = limit * 3 // 4
    return f"{text[:head]}\n[... {len(text) - limit:,} characters left out ...]\n{text[-(limit - head) :]}"
