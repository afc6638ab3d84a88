"""The ledger file and its audit: what is cut, what is refused, and which losses and doubles are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_rl.data import PromptCursor
from megatron_rl.rollout.dump import evaluation_file, remove_dumps_from, rollout_file
from megatron_rl.rollout.ledger import Entry, Ledger, LedgerError, audit

IDS = ["a", "b", "c", "d", "e"]


def cursor() -> PromptCursor:
    return PromptCursor(len(IDS), seed=3)


def pairs(*draws: int) -> list[tuple[int, str]]:
    return [(draw, IDS[cursor().index_at(draw)]) for draw in draws]


def books(drawn: int, waiting: list[int], finished: list[int]) -> dict[str, Any]:
    return {"cursor": {"drawn": drawn}, "waiting": waiting, "finished": finished}


TWO_STEPS = [Entry(1, pairs(0, 1), pairs(2)), Entry(2, pairs(3, 5), [])]


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for entry in TWO_STEPS:
        ledger.write(entry)
    assert ledger.read() == TWO_STEPS


def test_a_line_replaces_its_own_step_and_all_later_ones(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for entry in (*TWO_STEPS, Entry(3, pairs(6, 7), [])):
        ledger.write(entry)
    again = Entry(2, pairs(3, 4), pairs(5))
    ledger.write(again)
    assert ledger.read() == [TWO_STEPS[0], again]


def test_a_torn_last_line_is_no_step(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for entry in TWO_STEPS:
        ledger.write(entry)
    ledger.path.write_bytes(ledger.path.read_bytes()[:-4])
    assert ledger.read() == TWO_STEPS[:1]
    ledger.truncate_after(1)
    ledger.write(TWO_STEPS[1])
    assert ledger.read() == TWO_STEPS


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    Ledger(tmp_path).path.write_text('{"step": 1}\n')
    with pytest.raises(LedgerError, match=r"ledger.jsonl: not a line of a ledger"):
        Ledger(tmp_path).read()


def test_every_prompt_of_every_epoch_has_one_fate() -> None:
    found = audit(TWO_STEPS, cursor(), IDS, rejected=2, books=books(8, [4, 7], [6]), books_step=2)
    assert found.problems == []
    assert found.epochs == [
        {"trained": 3, "filtered": 1, "rejected": 2, "pending": 1},
        {"trained": 1, "filtered": 0, "rejected": 2, "pending": 4},
    ]


@pytest.mark.parametrize(
    ("entries", "state", "problem"),
    [
        ([*TWO_STEPS, Entry(3, pairs(1), [])], None, "draws settled more than once: 1"),
        ([Entry(1, pairs(0), pairs(0))], None, "draws settled more than once: 0"),
        ([Entry(1, [(0, "nobody")], [])], None, "draws that are another prompt: 0 is 'nobody'"),
        ([TWO_STEPS[1]], None, "the steps are not 1, 2, 3, ... without a gap: [2]"),
        (TWO_STEPS, books(8, [4], [6]), "draws lost at the checkpoint of step 2: 7"),
        (TWO_STEPS, books(8, [3, 4, 7], [6]), "draws both settled and pending at the checkpoint of step 2: 3"),
        (TWO_STEPS, books(5, [4], []), "draws that were never made at the checkpoint of step 2: 5"),
    ],
)
def test_what_is_lost_or_doubled_is_named(entries: list[Entry], state: dict[str, Any] | None, problem: str) -> None:
    assert audit(entries, cursor(), IDS, books=state, books_step=2).problems == [problem]


def test_steps_after_the_checkpoint_are_not_held_against_it() -> None:
    later = Entry(3, pairs(4, 6), [])
    assert audit([*TWO_STEPS, later], cursor(), IDS, books=books(7, [4], [6]), books_step=2).problems == []


def test_dumps_of_steps_that_are_made_again_go_and_those_of_the_warm_up_stay(tmp_path: Path) -> None:
    kept = [rollout_file(tmp_path, 2), evaluation_file(tmp_path, 0, "eval"), evaluation_file(tmp_path, 9, "sft")]
    gone = [rollout_file(tmp_path, 3), evaluation_file(tmp_path, 3, "eval"), evaluation_file(tmp_path, 4, "by_hand")]
    for path in (*kept, *gone):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    remove_dumps_from(tmp_path, 3)
    assert [path.exists() for path in (*kept, *gone)] == [True] * 3 + [False] * 3
    remove_dumps_from(tmp_path, 0)
    assert [path for path in kept if path.exists()] == []
