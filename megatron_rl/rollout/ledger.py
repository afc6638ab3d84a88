"""The ledger: what became of every prompt drawn, and the audit that none was lost or doubled. Draws nothing itself.

RUN/ledger.jsonl has one line for each step that was trained on, written by the controller before the step is dumped:

    {"step": 12, "trained": [[88, "sort:17"], ...], "filtered": [[91, "sort:3"], ...]}      pairs: draw, prompt id

The number of a draw names the epoch and the place in its order, so it stands here at most once along a run's lineage.
A resumed run cuts the file to the restored step before it adds a line, as it does with metrics and dumps. Prompts that
were rejected as too long are never drawn; what is in no line and not rejected is pending: still to be drawn in its
epoch, or waiting in the newest checkpoint to be drawn again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from megatron_rl.data import PromptCursor
from megatron_rl.files import regular, write_atomic

from .sample import Group

FILE_NAME = "ledger.jsonl"
Draw = tuple[int, str]
SHOWN = 5
"""Examples of one kind of fault that the audit names."""


class LedgerError(ValueError):
    """The ledger cannot be read; the message names file and line."""


@dataclass(frozen=True)
class Entry:
    """The prompts of one step, by what became of them."""

    step: int
    trained: list[Draw]
    filtered: list[Draw]

    @classmethod
    def of(cls, step: int, groups: Sequence[Group], batch: Collection[int]) -> Entry:
        """The groups that a step looked at; those in `batch` were trained on."""
        trained = [(group.id, group.prompt_id) for group in groups if group.id in batch]
        return cls(step, trained, [(group.id, group.prompt_id) for group in groups if group.id not in batch])


class Ledger:
    """RUN/ledger.jsonl, opened for each line: a file that somebody cut meanwhile is no danger."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / FILE_NAME

    def write(self, entry: Entry) -> None:
        """Add a line, durably; lines of this step and later ones belong to a past that was given up and go first."""
        self.truncate_after(entry.step - 1)
        line = {"step": entry.step, "trained": entry.trained, "filtered": entry.filtered}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            file.flush()
            os.fsync(file.fileno())

    def truncate_after(self, step: int) -> None:
        """Keep only lines of steps up to `step`, and no torn one. Raises LedgerError for a damaged file."""
        content = self._content()
        kept = [line for line in _whole_lines(content) if _parse(line, self.path).step <= step]
        if b"".join(kept) != content:
            write_atomic(self.path, b"".join(kept))

    def read(self) -> list[Entry]:
        """All entries; a torn last line is left out, a missing file has none. Raises LedgerError."""
        return [_parse(line, self.path) for line in _whole_lines(self._content())]

    def _content(self) -> bytes:
        try:
            return regular(self.path).read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise LedgerError(f"{self.path}: cannot be read ({error})") from error


def _whole_lines(content: bytes) -> list[bytes]:
    return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]


def _parse(line: bytes, path: Path) -> Entry:
    try:
        value = orjson.loads(line)
        return Entry(value["step"], *([(int(d), str(i)) for d, i in value[k]] for k in ("trained", "filtered")))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise LedgerError(
            f"{path}: not a line of a ledger ({error!r}): {line[:80]!r}; resume from an earlier checkpoint"
        ) from error


@dataclass
class Audit:
    """The ledger put beside the prompts.

    Attributes:
        epochs: number of prompts of each epoch begun, by what became of them; each row adds up to all prompts.
        problems: what is lost, doubled or contradicted; empty when all is well.
    """

    epochs: list[dict[str, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def audit(
    entries: Sequence[Entry],
    cursor: PromptCursor,
    prompt_ids: Sequence[str],
    rejected: int = 0,
    books: Mapping[str, Any] | None = None,
    books_step: int = 0,
) -> Audit:
    """Check that every prompt of every epoch is exactly one of trained, filtered, rejected or pending.

    Args:
        entries: the ledger.
        cursor: deals the indices of `prompt_ids`; only its order is used.
        prompt_ids: ids of the prompts that can be drawn, in the order of the file.
        rejected: prompts left out as too long.
        books: `GroupPool.state_dict()` and ids of finished groups (key `finished`) of the checkpoint of `books_step`:
            there, what is neither settled nor waiting would be lost.
    """
    fate = {draw: name for e in entries for name in ("trained", "filtered") for draw, _ in getattr(e, name)}
    found = Audit(problems=[*_wrong_steps(entries), *_wrong_draws(entries, cursor, prompt_ids)])
    epochs = max(fate, default=-1) // cursor.size + 1
    counts = Counter((draw // cursor.size, name) for draw, name in fate.items())
    for epoch in range(epochs):
        row = {name: counts[epoch, name] for name in ("trained", "filtered")} | {"rejected": rejected}
        found.epochs.append(row | {"pending": cursor.size - row["trained"] - row["filtered"]})
    if books is not None:
        found.problems += _contradictions([e for e in entries if e.step <= books_step], books, books_step)
    return found


def _wrong_steps(entries: Sequence[Entry]) -> list[str]:
    steps = [entry.step for entry in entries]
    if steps == list(range(1, len(steps) + 1)):
        return []
    return [f"the steps are not 1, 2, 3, ... without a gap: {steps}"]


def _wrong_draws(entries: Sequence[Entry], cursor: PromptCursor, prompt_ids: Sequence[str]) -> list[str]:
    draws = [pair for entry in entries for pair in (*entry.trained, *entry.filtered)]
    doubled = [draw for draw, count in Counter(draw for draw, _ in draws).items() if count > 1]
    strange = [f"{draw} is {name!r}" for draw, name in draws if prompt_ids[cursor.index_at(draw)] != name]
    return _say("draws settled more than once", doubled) + _say("draws that are another prompt", strange)


def _contradictions(entries: Sequence[Entry], books: Mapping[str, Any], step: int) -> list[str]:
    settled = {draw for entry in entries for draw, _ in (*entry.trained, *entry.filtered)}
    open_ = {*books["waiting"], *books["finished"]}
    drawn = set(range(books["cursor"]["drawn"]))
    where = f"at the checkpoint of step {step}"
    return (
        _say(f"draws lost {where}", drawn - settled - open_)
        + _say(f"draws both settled and pending {where}", settled & open_)
        + _say(f"draws that were never made {where}", (settled | open_) - drawn)
    )


def _say(what: str, cases: Iterable[Any]) -> list[str]:
    listed = sorted(cases)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return [f"{what}: {', '.join(str(c) for c in listed[:SHOWN])}{more}"] if listed else []
