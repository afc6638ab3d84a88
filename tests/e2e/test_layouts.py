"""The same run from the command line at each kind of layout: the first step is the one that a single rank takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.data import tiny_model

from .runs import FinishedRun, make_inputs, train

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
WORDS = (
    "steps=2",
    "deterministic=true",
    "sft.data=null",  # so that all begin with the same weights
    "rollout.groups_per_step=8",
    "rollout.group_size=4",
    "rollout.dynamic_sampling=off",
    "engine.max_running_requests=32",
    "algorithm.max_tokens_per_microbatch=100",  # several micro-batches
    "algorithm.updates_per_batch=1",
    "eval.every=0",
    "eval.prompts=8",
    "checkpoint.every=0",
    "reward.workers=1",
    "reward.components=[{name: 'tests.unit.rollout_hooks:even_count', correctness: true}]",
    "checkpoint.metric=eval/pass_at_1",
)
LAYOUTS = {
    "one rank": {},
    "TP2 PP2": {"tensor": 2, "pipeline": 2},
    "PP2 DP2": {"pipeline": 2, "data": 2},
    "PP2 VPP2": {"pipeline": 2, "virtual_pipeline": 2},
    "CP2": {"context": 2},
    "TP2 CP2": {"tensor": 2, "context": 2},
}


def run_in(layout: dict[str, int], folder: Path, inputs: Path) -> FinishedRun:
    sizes = {"tensor": 1} | layout
    keys = {name: f"{name}_model_parallel_size" for name in sizes}
    keys |= {name: f"{name}_parallel_size" for name in ("data", "context")}
    words = [f"parallel.{keys[name]}={size}" for name, size in sizes.items()]
    return train(folder, inputs, *WORDS, *words)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With four layers: one for each of the two virtual stages of two ranks."""
    folder = make_inputs(tmp_path_factory.mktemp("inputs"), prompts=16, eval_prompts=8, sft_prompts=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_model.CONFIG, "num_hidden_layers", 4)
        tiny_model.write_tiny_model(folder / "model", seed=1)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> FinishedRun:
    finished = run_in(LAYOUTS["one rank"], tmp_path_factory.mktemp("alone") / "run", inputs)
    assert finished.code == 0, finished.output
    return finished


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one rank"])
def test_a_layout_takes_the_first_step_of_one_rank(name: str, tmp_path: Path, inputs: Path, alone: FinishedRun) -> None:
    finished = run_in(LAYOUTS[name], tmp_path / "run", inputs)
    assert finished.code == 0, finished.output
    assert [row["gap/max_abs"] <= 1e-4 for row in finished.steps] == [True] * 2
    mine, theirs = finished.steps[0], alone.steps[0]
    assert mine.keys() == theirs.keys()
    own = ("time", "system/", "policy/microbatches")  # shares of ranks differ, and so does their packing
    compared = [key for key in mine if not key.startswith(own)]
    assert {key: mine[key] for key in compared} == pytest.approx(
        {key: theirs[key] for key in compared}, rel=2e-3, abs=1e-5
    )
    assert mine["optimizer/grad_norm"] > 0.01
