"""Engines and trainer that take turns on the same devices: the order of calls as the servers saw it, and who dies when.

On a CPU the engines' memory stays where it is, while the trainer's state really moves.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from pathlib import Path

import pytest

from .live import LiveRun, exact_metrics
from .runs import FinishedRun, make_inputs, train

pytestmark = pytest.mark.e2e
COLOCATED = ("cluster.placement=colocated", "engine.weight_transport=ipc")
TINY = (
    "sft.max_steps=10",
    "sft.batch_size=16",
    "sft.stop_value=null",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.dynamic_sampling=off",
    "eval.prompts=8",
    "eval.every=0",
    "checkpoint.every=1",
    "cluster.stop_timeout_s=5",
    "algorithm.preset=grpo",
    "reward.components=[{name: sorting, correctness: true}, {name: sorting_format}]",
)
CONTROL = re.compile(r"POST /(\w+)")
GIVE_UP = ["pause_generation", "release_memory_occupation"]
SAVE = [*GIVE_UP, "resume_memory_occupation", "continue_generation"]
"""A checkpoint in the engines' turn."""
SENDING = {
    "disk": ["update_weights_from_disk"],
    "ipc": ["begin_weight_update", "update_weights_from_tensor", "update_weight_version", "end_weight_update"],
}
UPDATE = {
    kind: [
        "resume_memory_occupation",  # for weights
        "pause_generation",
        "flush_cache",
        *sending,
        "weights_checker",
        "resume_memory_occupation",  # for the KV cache
        "continue_generation",
    ]
    for kind, sending in SENDING.items()
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"), prompts=64, eval_prompts=8, sft_prompts=64)


def calls(folder: Path, replica: int = 0) -> list[str]:
    """Control calls that a server has answered, in order; those that are repeated are named once."""
    found = CONTROL.findall((folder / "logs" / f"engine-{replica}.log").read_text())
    return [name for name, _ in itertools.groupby(found)]


def turn(folder: Path) -> str:
    """Whose it is."""
    try:
        return str(json.loads((folder / "endpoints" / "turn.json").read_text())["turn"])
    except FileNotFoundError:
        return ""


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> FinishedRun:
    """Two steps with two engines, nothing amiss."""
    run = train(tmp_path_factory.mktemp("run") / "run", inputs, "steps=2", "engine.replicas=2", *TINY, *COLOCATED)
    assert run.code == 0, run.output
    return run


def test_servers_see_the_turns_in_order(colocated: FinishedRun) -> None:
    from_disk, from_memory = UPDATE["disk"], UPDATE["ipc"]
    first = [*GIVE_UP, *from_disk, *SAVE]  # as the trainer comes up; after the warm-up, with its checkpoint
    for replica in range(2):
        assert calls(colocated.folder, replica) == [*first, *2 * [*GIVE_UP, *from_memory, *SAVE]]


def test_weights_arrive_in_what_the_engines_have_taken_back(colocated: FinishedRun) -> None:
    assert [row["gap/max_abs"] <= 1e-4 for row in colocated.steps] == [True] * 2
    assert sorted(path.name for path in (colocated.folder / "weights").glob("v*")) == ["v000000"]  # others were memory
    assert turn(colocated.folder) == "engines"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> Path:
    """Three steps with devices of their own, and weights from disk."""
    run = train(tmp_path_factory.mktemp("own") / "run", inputs, "steps=3", "deterministic=true", *TINY)
    assert run.code == 0, run.output
    return run.folder


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_shared_devices_change_no_number_even_when_an_engine_dies_without_its_memory(
    tmp_path: Path, inputs: Path, expected: Path, replicas: int
) -> None:
    """It is started again when it may have memory, not before; alone it is waited for, else the other one goes on."""
    folder, words = tmp_path / "run", (f"engine.replicas={replicas}", "steps=3", "deterministic=true")
    with LiveRun(folder, inputs, *words, *TINY, *COLOCATED) as run:
        run.wait_for_step(1)
        engine = run.pid("engine", replicas - 1)
        run.wait_until("the trainer's turn", lambda: turn(folder) == "trainer")
        os.kill(engine, signal.SIGKILL)
        assert run.end() == 0, run.output
    assert "starting it again" in (folder / "logs" / f"engine-{replicas - 1}.log").read_text()
    assert exact_metrics(folder) == exact_metrics(expected)


@pytest.mark.slow
def test_a_run_that_is_asked_to_end_in_any_turn_is_saved_and_goes_on(
    tmp_path: Path, inputs: Path, expected: Path
) -> None:
    """TERM in the trainer's turn; and in the engines' turn, while the engine, which is to lend memory, is silent."""
    folder, words = tmp_path / "run", ("steps=3", "deterministic=true", *TINY, *COLOCATED, "checkpoint.every=0")
    with LiveRun(folder, inputs, *words) as run:
        run.wait_for_step(1)
        run.wait_until("the trainer's turn", lambda: turn(folder) == "trainer")
        run.send(signal.SIGTERM, "launcher")
        assert run.end() == 75, run.output
    with LiveRun(folder, inputs, *words, "--resume") as run:
        run.wait_until("the trainer's turn", lambda: turn(folder) == "trainer")
        run.wait_until("the engines' turn", lambda: turn(folder) == "engines" and "continue" in calls(folder)[-1])
        run.send(signal.SIGSTOP, "engine")
        run.send(signal.SIGTERM, "launcher")
        assert run.end() == 75, run.output
    resumed = train(folder, inputs, *words, "--resume")
    assert resumed.code == 0, resumed.output
    assert exact_metrics(folder) == exact_metrics(expected)
