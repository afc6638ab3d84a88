"""Checkpoints move between layouts of one, two and four ranks, and the losses go on as if nothing had happened.

What a checkpoint must bring back beyond the losses is in test_checkpoint_resume.py, whose steps are taken here too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.launch import run_ranks
from tests.parallel.layout_cases import LAYOUTS
from tests.parallel.policy_setup import DP2, DP4, EP2, EP4, ETP2, PP2, SP, TP2
from tests.parallel.test_checkpoint_resume import VOCAB, WHOLE, read_checkpoint, write_checkpoint
from tests.tiny import tiny_model

pytestmark = pytest.mark.parallel

EXPERT_LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {"EP2": DP2 | EP2, "TP2 ETP2 SP": TP2 | SP | ETP2, "TP2 EP2 SP": TP2 | SP | EP2},
    4: {
        "PP2 EP2": PP2 | DP2 | EP2,
        "TP2 DP2 EP2 SP": TP2 | DP2 | SP | EP2,
        "EP4": DP4 | EP4,
        "PP2 EP2 whole": PP2 | DP2 | EP2 | WHOLE,
        "DP4 EP2 whole": DP4 | EP2 | WHOLE,
    },
}
"""Processes -> name -> section `parallel`, for a model with experts."""
SIZES = {name: size for table in (LAYOUTS, EXPERT_LAYOUTS) for size, layouts in table.items() for name in layouts}
BY_NAME = {
    name: layout
    for table in (LAYOUTS, EXPERT_LAYOUTS)
    for layouts in table.values()
    for name, layout in layouts.items()
}
BY_NAME |= {"one rank": {}, "one rank whole": WHOLE}
Pairs = dict[str, list[str]]
FIRST: Pairs = {
    "TP2 PP2": ["TP2 PP2", "PP2 DP2", "TP2 SP"],
    "PP2 DP2": ["TP2 PP2", "one rank"],
    "CP2": ["CP2", "one rank"],
}
"""Writer -> readers, in the first tier."""
SLOW: Pairs = {
    "TP2 PP2": ["PP2 VPP2 DP2", "DP4", "one rank"],
    "PP2 DP2": ["PP2 DP2", "TP2 DP2 SP", "PP4", "DP2"],
    "TP2 PP2 VPP2": ["TP2 PP2 VPP2", "DP4", "PP2 VPP2"],
    "one rank": ["TP2 PP2", "PP2 DP2"],
    "CP2 DP2": ["CP2 DP2", "TP2 CP2 SP", "PP2 DP2"],
    "TP2 CP2 SP": ["PP2 CP2", "TP2 CP2 SP", "DP2"],
}
EXPERTS_FIRST: Pairs = {
    "PP2 EP2": ["PP2 EP2", "DP2", "TP2 ETP2 SP"],
    "DP2": ["PP2 EP2"],
}
EXPERTS_SLOW: Pairs = {
    "EP2": ["EP2", "EP4", "one rank", "TP2 EP2 SP"],
    "TP2 DP2 EP2 SP": ["TP2 DP2 EP2 SP", "EP2", "PP2 EP2"],
    "one rank": ["EP4", "TP2 DP2 EP2 SP"],
    "TP2 ETP2 SP": ["TP2 EP2 SP", "EP2"],
    "PP2 EP2 whole": ["DP4 EP2 whole", "one rank whole"],
    "one rank whole": ["PP2 EP2 whole"],
}
"""Likewise, for a model with experts in its last two layers: at PP 2 its first stage has none."""
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
    return SIZES.get(name, 1)


def dense_model(factory: pytest.TempPathFactory) -> Path:
    return tiny_model(factory.mktemp("model"), vocab_size=VOCAB, layers=4)


def expert_model(factory: pytest.TempPathFactory) -> Path:
    return tiny_model(factory.mktemp("model"), "qwen3_moe", vocab_size=VOCAB, layers=4, mlp_only_layers=[0, 1])


def resume(pairs: Pairs, path: Path, factory: pytest.TempPathFactory) -> Outcomes:
    """Write in the layouts of `pairs` and read in others, with one launch for each number of ranks."""
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
    check(FIRST, resume(FIRST, dense_model(tmp_path_factory), tmp_path_factory))


def test_experts_and_their_optimizer_state_move_between_expert_parallel_sizes(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    check(EXPERTS_FIRST, resume(EXPERTS_FIRST, expert_model(tmp_path_factory), tmp_path_factory))


@pytest.mark.slow
@pytest.mark.parametrize(("pairs", "model"), [(SLOW, dense_model), (EXPERTS_SLOW, expert_model)])
def test_losses_after_resuming_in_yet_other_layouts_are_those_of_the_uninterrupted_run(
    pairs: Pairs, model: Callable[[pytest.TempPathFactory], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(pairs, resume(pairs, model(tmp_path_factory), tmp_path_factory))
