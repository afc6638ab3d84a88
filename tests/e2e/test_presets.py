"""Every preset, correction and mode of old log-probs through the real stack: two steps with engine and trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from .runs import make_inputs, train

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
WORDS = (
    "steps=2",
    "sft.max_steps=10",
    "sft.stop_value=null",
    "rollout.groups_per_step=8",
    "rollout.group_size=4",
    "rollout.dynamic_sampling=off",
    "eval.prompts=8",
    "checkpoint.every=0",
    "algorithm.max_tokens_per_microbatch=200",  # several micro-batches
    "reward.components=[{name: sorting, correctness: true}, {name: sorting_format}]",
)
KL_IN_REWARD = {"kl_place": "reward", "kl_coef": 0.05}
REJECTING = {"corrections": "[mis,seq_mis]", "correction_bounds": "[0.99,1.01]", "seq_mis_bounds": "[0.999,1.001]"}
CASES: dict[str, dict[str, Any]] = {
    "dapo": {"preset": "dapo", "corrections": "[tis,seq_mis]", "seq_mis_bounds": "[0.9,1.1]", "dual_clip": 3},
    "grpo": {"preset": "grpo"},
    "dr_grpo": {"preset": "dr_grpo", "updates_per_batch": 1, "old_logprobs": "reuse", "corrections": "icepop"},
    "gspo": {"preset": "gspo", **REJECTING, "renormalise_after_rejection": True},
    "cispo": {"preset": "cispo", "entropy_coef": 0.001},
    "rloo": {"preset": "rloo", "old_logprobs": "rollout", **KL_IN_REWARD},
    "reinforce_pp": {"preset": "reinforce_pp", "loss": "sapo"},
    "ema": {"preset": "grpo", "ema_baseline": 0.1, "loss": "gmpo", "kl_estimator": "k2"},
    "opmd": {"preset": "dr_grpo", "loss": "opmd", "loss_args.tau": 0.1},
    "a loss of one's own": {"loss": "tests.unit.loss_hooks:centred", "loss_args.scale": 0.5},
}

LAYOUTS = {"rloo": ("parallel.tensor_model_parallel_size=1", "parallel.data_parallel_size=2")}
"""The others run at TP2."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"), prompts=64, eval_prompts=8, sft_prompts=256)


@pytest.mark.parametrize("case", CASES)
def test_two_steps_of_each_way_to_update(case: str, inputs: Path, tmp_path: Path) -> None:
    algorithm = [f"algorithm.{key}={value}" for key, value in CASES[case].items()]
    run = train(tmp_path / "run", inputs, *WORDS, *algorithm, *LAYOUTS.get(case, ()))
    assert run.code == 0, run.output
    assert [row["step"] for row in run.steps] == [1, 2]
    for row in run.steps:
        assert row["optimizer/skipped"] == 0
        assert row["optimizer/grad_norm"] > 0
        assert math.isfinite(row["policy/loss"])
        assert 0.99 < row["gap/ess"] <= 1 + 1e-9
        assert row["policy/rejected_fraction"] < 0.01
        assert ("policy/kl_reference" in row) == ("kl_coef" in CASES[case] or case in ("grpo", "ema"))
