"""Partial rollouts, one step off and async as whole runs: the ages of tokens, and the books after a kill.

Timing decides here what is trained on, so nothing is compared with another run: what must hold whatever happens is.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from megatron_rl.audit import audit_run
from megatron_rl.monitor.metric_names import METRICS, undocumented

from .live import LiveRun, processes_of, rows
from .runs import FinishedRun, make_inputs, train

pytestmark = pytest.mark.e2e
SHORT = (
    "sft.max_steps=10",  # so that responses end at different lengths
    "sft.stop_value=null",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.dynamic_sampling=off",
    "rollout.segment_tokens=4",
    "engine.max_running_requests=16",
    "eval.every=0",
    "eval.prompts=4",
    "checkpoint.every=1",
    "cluster.stop_timeout_s=5",
    "algorithm.preset=grpo",
    "reward.workers=1",
    "reward.components=[{name: 'tests.unit.rollout_hooks:even_count', correctness: true}]",
)
MODES = {
    "partial": ("rollout.partial_rollouts=true", "rollout.oversample=1.5"),
    "one_step_off": ("rollout.mode=one_step_off", "rollout.max_staleness=1"),
    "async": ("rollout.mode=async", "rollout.dynamic_sampling=refill", "rollout.max_sample_rounds=100"),
    "async, in place": ("rollout.mode=async", "engine.pause_mode=in_place", "rollout.stale_policy=mask_stale_tokens"),
}
STALENESS = {"one_step_off": 1}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"), prompts=16, eval_prompts=4, sft_prompts=64)


def trained(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Rows of the samples that were trained on, by RL step counted from 0."""
    files = sorted((folder / "rollouts").glob("step-*.parquet"))
    found = {int(file.stem[-6:]) - 1: pq.read_table(file).to_pylist() for file in files}
    return {step: [row for row in samples if row["trained"]] for step, samples in found.items()}


def assert_whole(folder: Path, steps: int, max_staleness: int) -> None:
    """Every step has its samples, none older than allowed or of weights to come, and every prompt has one fate."""
    batches = trained(folder)
    assert list(batches) == list(range(steps))
    for step, samples in batches.items():
        assert len(samples) == 16
        assert max(row["weight_version_last"] for row in samples) <= step
        assert min(row["weight_version_first"] for row in samples) >= step - max_staleness
    assert [row["step"] for row in rows(folder) if "policy/loss" in row] == list(range(1, steps + 1))
    assert audit_run(folder).problems == []
    assert processes_of(folder) == []


def ages(run: FinishedRun) -> list[float]:
    return [row["rollout/staleness_max"] for row in run.steps]


@pytest.mark.parametrize("mode", ["partial", "one_step_off"])
def test_a_run_trains_on_tokens_of_older_weights_and_on_none_that_are_too_old(
    mode: str, tmp_path: Path, inputs: Path
) -> None:
    run = train(tmp_path / "run", inputs, "steps=4", *SHORT, *MODES[mode])
    assert run.code == 0, run.output
    limit = STALENESS.get(mode, 2)
    assert_whole(run.folder, 4, limit)
    assert ages(run)[0] == 0
    assert 1 <= max(ages(run)) <= limit
    if mode == "partial":
        assert sum(row["rollout/resumed_tokens"] for row in run.steps) > 0
        samples = [row for batch in trained(run.folder).values() for row in batch]
        assert any(row["weight_version_first"] < row["weight_version_last"] for row in samples)
    else:
        assert ages(run) == [0, 1, 1, 1]
    written = {name for row in rows(run.folder) for name in row}
    assert undocumented(written) == []
    named = {info.name for info in METRICS if "off" in info.runs and "<" not in info.name}
    assert named
    assert named <= written


def test_an_async_run_that_is_killed_and_resumed_has_lost_and_doubled_nothing(tmp_path: Path, inputs: Path) -> None:
    folder, words = tmp_path / "run", ("steps=6", *SHORT, *MODES["async"])
    with LiveRun(folder, inputs, *words) as run:
        run.wait_for_step(2)
        run.send(signal.SIGKILL, "engine")  # is started again, and given what is unfinished
        run.wait_for_step(3)
        run.send(signal.SIGKILL, "trainer", 1)
        assert run.end() == 1, run.output
    resumed = train(folder, inputs, *words, "--resume")
    assert resumed.code == 0, resumed.output
    assert_whole(folder, 6, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("role", ["controller", "trainer", "launcher"])
def test_whoever_is_killed_in_whichever_mode_the_books_are_whole(
    mode: str, role: str, tmp_path: Path, inputs: Path
) -> None:
    folder, words = tmp_path / "run", ("steps=8", *SHORT, *MODES[mode])
    with LiveRun(folder, inputs, *words) as run:
        run.wait_for_step(2)
        run.send(signal.SIGKILL, role)
        assert run.end() in (1, -9), run.output
    with LiveRun(folder, inputs, *words, "--resume") as run:
        run.wait_for_step(5)
        run.send(signal.SIGTERM, "launcher")
        assert run.end() in (0, 75), run.output
    resumed = train(folder, inputs, *words, "--resume")
    assert resumed.code == 0, resumed.output
    policy_masks = "mask_stale_tokens" in " ".join(words)
    assert_whole(folder, 8, 8 if policy_masks else STALENESS.get(mode, 2))
    assert max(row["rollout/staleness_share_over"] - row["rollout/stale_masked_fraction"] for row in resumed.steps) <= 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "one_step_off", "async"])
def test_an_engine_that_comes_back_without_the_weights_is_given_them_by_the_trainer(
    mode: str, tmp_path: Path, inputs: Path
) -> None:
    """Nothing but the first weights is on the disk: an engine that starts in mid-run holds those."""
    folder, words = tmp_path / "run", ("steps=8", *SHORT, "engine.weight_transport=broadcast", *MODES.get(mode, ()))
    with LiveRun(folder, inputs, *words) as run:
        run.wait_for_step(3)
        run.send(signal.SIGSTOP, "controller")  # the trainer waits for it, and publishes nothing meanwhile
        run.send(signal.SIGKILL, "engine")
        engine = folder / "logs" / "engine-0.log"
        run.wait_until("the engine to be back", lambda: engine.read_text().count("engine ready at") > 1)
        run.send(signal.SIGCONT, "controller")
        assert run.end() == 0, run.output
    if mode == "sync":  # else there may be rollouts enough to get to the next update
        assert "once more, for http://" in (folder / "logs" / "trainer-0.log").read_text()
    assert_whole(folder, 8, STALENESS.get(mode, 2) if mode in MODES else 0)
