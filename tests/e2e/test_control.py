"""Learning comes from the rewards: the same run with rewards permuted within each group must not learn."""

from __future__ import annotations

from pathlib import Path

import pytest

from .runs import FinishedRun, make_inputs, train

pytestmark = pytest.mark.e2e
STEPS = 12


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, FinishedRun]:
    """Shuffled and unshuffled: same seed, model, prompts and steps; `mask`, so that both train on as many groups."""
    inputs = make_inputs(tmp_path_factory.mktemp("inputs"), seed=11)
    runs = {}
    for shuffle in (False, True):
        words = [f"steps={STEPS}", "seed=11", "rollout.dynamic_sampling=mask", f"reward.shuffle={shuffle}"]
        runs[shuffle] = train(tmp_path_factory.mktemp("run") / "run", Path(inputs), *words, "eval.samples_per_prompt=2")
        assert runs[shuffle].code == 0, runs[shuffle].output
    return runs


def test_both_begin_with_the_format_and_little_skill(twins: dict[bool, FinishedRun]) -> None:
    for run in twins.values():
        assert run.result["format_valid_before"] >= 0.85
        assert run.result["pass_at_1_before"] <= 0.2


def test_with_true_rewards_the_final_interval_lies_above_the_initial_one(twins: dict[bool, FinishedRun]) -> None:
    result = twins[False].result
    assert result["pass_at_1_after_interval"][0] > result["pass_at_1_before_interval"][1]


def test_with_permuted_rewards_it_does_not_rise(twins: dict[bool, FinishedRun]) -> None:
    result = twins[True].result
    assert result["pass_at_1_after_interval"][1] <= result["pass_at_1_before_interval"][1]
