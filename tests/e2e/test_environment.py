"""A run whose model talks with a calculator: what is trained on is what the engines sampled, turn by turn."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megatron_rl.environments.calculator import HINT
from megatron_rl.monitor.metric_names import undocumented

from .runs import make_inputs, train

pytestmark = pytest.mark.e2e
CALCULATOR = (
    "rollout.environment=megatron_rl.environments.calculator:Calculator",
    "rollout.environment_args={penalty: 0.1}",
    "rollout.max_turns=3",
    "rollout.max_turn_tokens=8",
    "rollout.max_prompt_tokens=40",
    "rollout.max_response_tokens=216",
    "rollout.segment_tokens=5",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.dynamic_sampling=off",
    "rollout.partial_rollouts=true",
    "rollout.oversample=2",
    "algorithm.updates_per_batch=1",
    "parallel.tensor_model_parallel_size=1",
    "sft.data=null",
    "sft.stop_value=null",
    "eval.prompts=4",
    "checkpoint.keep_best=0",
    "reward.components=[{name: countdown, correctness: true}, {name: environment},"
    " {name: 'tests.unit.reward_hooks:length', weight: 0.01}]",  # so early no answer is right, but lengths differ
    "reward.workers=1",
)


def test_two_steps_with_a_calculator_through_suspended_responses(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path / "inputs", task="countdown", prompts=64, eval_prompts=16, sft_prompts=1)
    run = train(tmp_path / "run", inputs, "steps=2", *CALCULATOR)
    assert run.code == 0, run.output
    for number, metrics in enumerate(run.steps, start=1):
        assert undocumented(metrics) == []
        assert metrics["rollout/turns_max"] == 3.0
        assert metrics["rollout/environment_errors"] == metrics["reward/errors"] == 0.0
        assert metrics["rollout/observation_tokens_mean"] > len(HINT)
        rows = pq.read_table(run.folder / "rollouts" / f"step-{number:06d}.parquet").to_pylist()
        assert len(rows) == 16
        for row in rows:
            assert row["trained"]
            assert 0 <= row["gap_mean_abs"] <= row["gap_max_abs"]
            if row["weight_version_first"] == number - 1:  # no token of older weights
                assert row["gap_max_abs"] < 1e-5
            assert row["response"].count("an expression") >= row["turns"] - 1
            assert json.loads(row["components"])["environment"] == 0.0
        assert max(row["gap_max_abs"] for row in rows) == pytest.approx(metrics["gap/max_abs"])
