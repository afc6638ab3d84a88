"""Checkpoints move between layouts of one, two and four ranks, and the losses go on as if nothing had happened.

What a checkpoint must bring back beyond the losses is in test_checkpoint_resume.py, whose steps are taken here too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.launch import run_ranks
from tests.parallel.layout_cases import LAYOUTS
from tests.parallel.test_checkpoint_resume import VOCAB, read_checkpoint, write_checkpoint
from tests.tiny import tiny_model

pytestmark = pytest.mark.parallel

BY_NAME: dict[str, dict[str, Any]] = {"one rank": {}} | LAYOUTS[2] | LAYOUTS[4]
Pairs = dict[str, list[str]]
FIRST: Pairs = {
    "TP2 PP2": ["TP2 PP2", "PP2 DP2", "TP2 SP"],
    "PP2 DP2": ["TP2 PP2", "one rank"],
}
"""Writer -> readers, in the first tier."""
SLOW: Pairs = {
    "TP2 PP2": ["PP2 VPP2 DP2", "DP4", "one rank"],
    "PP2 DP2": ["PP2 DP2", "TP2 DP2 SP", "PP4", "DP2"],
    "TP2 PP2 VPP2": ["TP2 PP2 VPP2", "DP4", "PP2 VPP2"],
    "one rank": ["TP2 PP2", "PP2 DP2"],
}
Outcomes = dict[str, list[dict[str, Any]]]
"""Writer, or `writer -> reader`: what each rank found."""


def go(pairs: Pairs, paths: dict[bool, str], runs: str, size: int, writing: bool) -> dict[str, Any]:
    """In a rank: write, or read, in every layout of this size."""
    from megatron_rl.policy import distributed

    found = {}
    for writer, readers in pairs.items():
        if writing and _size(writer) == size:
            found[writer] = write_checkpoint(paths, Path(runs), writer, BY_NAME[writer])
        for reader in readers:
            if not writing and _size(reader) == size:
                found[f"{writer} -> {reader}"] = read_checkpoint(paths, Path(runs), writer, BY_NAME[reader])
    distributed.shutdown()
    return found


def _size(name: str) -> int:
    return next((size for size, layouts in LAYOUTS.items() if name in layouts), 1)


def resume(pairs: Pairs, factory: pytest.TempPathFactory) -> Outcomes:
    """Write in the layouts of `pairs` and read in others, with one launch for each number of ranks."""
    path = tiny_model(factory.mktemp("model"), vocab_size=VOCAB, layers=4)
    runs = str(factory.mktemp("runs"))
    names = {True: set(pairs), False: {reader for readers in pairs.values() for reader in readers}}
    results: Outcomes = {}
    for writing in (True, False):
        for size in sorted({_size(name) for name in names[writing]}):
            for rank in run_ranks(size, go, pairs, {False: str(path)}, runs, size, writing, timeout=400):
                for name, outcome in rank.items():
                    results.setdefault(name, []).append(outcome)
    return results


def check(pairs: Pairs, found: Outcomes) -> None:
    """All readers saw the writer's losses; in its own layout to the last bit, random numbers included."""
    for writer, readers in pairs.items():
        for reader in readers:
            for written, read in zip(found[writer], found[f"{writer} -> {reader}"], strict=False):
                assert read["losses"] == pytest.approx(written["losses"], rel=1e-4, abs=1e-5), (writer, reader)
                if reader == writer:
                    assert read["losses"] == written["losses"]
                    assert read["drawn"] == written["drawn"]


def test_losses_after_resuming_at_four_ranks_are_those_of_the_uninterrupted_run(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    check(FIRST, resume(FIRST, tmp_path_factory))


@pytest.mark.slow
def test_losses_after_resuming_in_yet_other_layouts_are_those_of_the_uninterrupted_run(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    check(SLOW, resume(SLOW, tmp_path_factory))
