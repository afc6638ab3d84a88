"""The whole circle from one command: engine, controller and TP2 trainer as real processes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megatron_rl.monitor.metric_names import METRICS, undocumented

from .live import LiveRun, processes_of
from .runs import ROOT, FinishedRun, make_inputs, train

pytestmark = pytest.mark.e2e
SHORT = (
    "sft.max_steps=10",
    "sft.stop_value=null",
    "rollout.groups_per_step=8",
    "rollout.group_size=4",
    "rollout.dynamic_sampling=off",
    "eval.prompts=32",
    "eval.every=2",
    "checkpoint.every=1",
    "checkpoint.keep_last=3",
    "algorithm.preset=grpo",  # with a reference model
    # So early only the format differs between the samples of a group.
    "reward.components=[{name: sorting, correctness: true}, {name: sorting_format}]",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"), prompts=256, eval_prompts=64, sft_prompts=256)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, inputs: Path) -> FinishedRun:
    """Three steps at TP2."""
    folder = tmp_path_factory.mktemp("run with spaces") / "run"
    finished = train(folder, inputs, "steps=3", *SHORT)
    assert finished.code == 0, finished.output
    return finished


def test_three_steps_at_tp2_are_written_down(run: FinishedRun) -> None:
    assert [row["step"] for row in run.steps] == [1, 2, 3]
    assert run.result["steps"] == 3
    assert run.result["pass_at_1_before"] is not None
    assert (run.folder / "report.html").stat().st_size > 10_000
    assert list((run.folder / "tensorboard").iterdir())


def test_every_metric_of_a_run_is_documented_and_the_other_way_round(run: FinishedRun) -> None:
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    written = {name for row in rows for name in row}
    assert undocumented(written) == []
    assert {info.name for info in METRICS if "<" not in info.name and not info.runs} - written == set()


def test_engine_and_trainer_agree_after_every_weight_update(run: FinishedRun) -> None:
    """The engine's log-probs are those of the weights that the trainer had just published."""
    assert [row["gap/max_abs"] <= 1e-4 for row in run.steps] == [True] * 3
    assert all(row["policy/kl_reference"] >= 0 for row in run.steps)
    assert run.steps[-1]["policy/kl_reference"] > run.steps[0]["policy/kl_reference"]


def test_the_update_is_seen_in_the_weights_and_in_the_samples(run: FinishedRun) -> None:
    files = sorted((run.folder / "weights").glob("v*/model.safetensors"))
    assert len({hashlib.sha256(file.read_bytes()).hexdigest() for file in files}) == len(files) == 2
    for step in range(3):
        table = pq.read_table(run.folder / "rollouts" / f"step-{step + 1:06d}.parquet")
        assert set(table["weight_version_first"].to_pylist()) == {step}
        assert set(table["weight_version_last"].to_pylist()) == {step}


def test_the_dump_holds_what_was_sampled_and_how_it_was_judged(run: FinishedRun) -> None:
    table = pq.read_table(run.folder / "rollouts" / "step-000001.parquet")
    rows = table.to_pylist()
    assert len(rows) == 8 * 4
    for row in rows:
        digits = "".join(c for c in row["prompt"] if c.isdigit())
        assert row["correctness"] == float(row["response"] == "".join(sorted(digits))), row


def test_a_checkpoint_is_judged_by_the_evaluation_of_its_own_step_only(run: FinishedRun) -> None:
    """Evaluations before the first step, after step 2 and after step 3."""
    manifests = sorted((run.folder / "checkpoints").glob("step-*/manifest.json"))
    judged = {m["step"]: m["metric"] for m in (json.loads(path.read_text()) for path in manifests) if m["step"] > 0}
    measured = {row["step"]: row.get("eval/pass_at_1") for row in run.steps}
    assert judged == measured
    assert [step for step, metric in judged.items() if metric is None] == [1]


def test_nothing_of_the_run_is_left_running(run: FinishedRun) -> None:
    assert processes_of(run.folder) == []


def test_a_finished_run_is_not_overwritten(run: FinishedRun, inputs: Path) -> None:
    again = train(run.folder, inputs, "steps=3", *SHORT)
    assert again.code == 2
    assert "add --resume" in again.output


def test_a_run_goes_on_from_its_newest_checkpoint_at_another_layout(run: FinishedRun, inputs: Path) -> None:
    layout = ("parallel.tensor_model_parallel_size=1", "parallel.pipeline_model_parallel_size=2")
    resumed = train(run.folder, inputs, "steps=4", *SHORT, *layout, "--resume")
    assert resumed.code == 0, resumed.output
    assert [row["step"] for row in resumed.steps] == [1, 2, 3, 4]
    assert resumed.steps[-1]["gap/max_abs"] <= 1e-4
    assert resumed.result["pass_at_1_before"] == run.result["pass_at_1_before"]
    assert "warm-up" not in resumed.output


@pytest.fixture
def served(inputs: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a generation server that belongs to no run."""
    command = [sys.executable, "-m", "megatron_rl.cli", "serve", "--model", str(inputs / "model"), "--port", "0"]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(command, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        deadline, ready = time.monotonic() + 120, None
        while ready is None:
            text = (tmp_path / "server.log").read_text()
            assert server.poll() is None, text
            assert time.monotonic() < deadline, text
            ready = re.search(r"engine ready at (http://\S+),", text)
            time.sleep(0.1)
        yield ready[1]
        assert server.poll() is None, "the run has ended a server that it had not started"
    finally:
        server.terminate()
        server.wait(60)


def test_a_run_uses_a_server_that_runs_already_and_leaves_it_running(served: str, tmp_path: Path, inputs: Path) -> None:
    finished = train(tmp_path / "run", inputs, "steps=2", *SHORT, "sft.data=null", f"engine.urls=[{served}]")
    assert finished.code == 0, finished.output
    assert [row["gap/max_abs"] <= 1e-4 for row in finished.steps] == [True] * 2
    assert not list((tmp_path / "run" / "logs").glob("engine-*"))


def test_term_saves_the_run_and_ends_it_with_75(tmp_path: Path, inputs: Path) -> None:
    folder = tmp_path / "run"
    with LiveRun(folder, inputs, "steps=1000", *SHORT, "checkpoint.every=0") as run:
        run.wait_for_step(1)
        run.send(signal.SIGTERM, "launcher")
        assert run.end() == 75, run.output  # and no process is left
        said = run.output
    assert "asked to end: saving the run first, which may take 300 s at most" in said
    assert f"the same command with --resume goes on with {folder}" in said
    saved = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert saved[0] == "step-000000"  # after the warm-up
    assert len(saved) == 2
    assert saved[1].startswith("step-")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("optimizer.lr_warmup=1", "optimizer.lr_warmup: unknown key; did you mean optimizer.lr_warmup_steps?"),
        ("parallel.world_size=3", "world_size=3, but tensor 2"),
        ("rollout.max_prompt_tokens=4", "rollout.max_prompt_tokens=4"),
        ("reward.components=[{name: nothing_format}]", "nothing_format"),
        ("cluster.device=cuda", "cluster.device=cuda: "),
        ("optimizer.lr=[1,2]", "optimizer.lr=[1, 2]: input should be a valid number"),
    ],
)
def test_what_cannot_run_ends_in_seconds_with_one_message(
    tmp_path: Path, inputs: Path, word: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as on a machine without any
    refused = train(tmp_path / "run", inputs, word, timeout=120)
    assert refused.code in (1, 2)
    assert expected in refused.output
    assert "Traceback" not in refused.output


def test_a_bad_prompt_line_is_named_with_file_and_line(tmp_path: Path, inputs: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "1", "answer": "1"}\n{"prompt": \n')
    refused = train(tmp_path / "run", inputs, f"data.prompts={bad}", timeout=120)
    assert refused.code in (1, 2)
    assert f"{bad}:2" in refused.output
    assert "Traceback" not in refused.output


def test_a_warm_up_example_that_no_micro_batch_can_hold_is_named(tmp_path: Path, inputs: Path) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text('{"prompt": "12", "target": "12"}\n{"prompt": "12", "target": "' + "1" * 60 + '"}\n')
    words = (f"sft.data={long}", "algorithm.max_tokens_per_microbatch=24")
    refused = train(tmp_path / "run", inputs, *words, timeout=120)
    assert refused.code == 2
    assert f"{long}:2: prompt and target have" in refused.output
    assert "algorithm.max_tokens_per_microbatch allows 24" in refused.output
    assert "Traceback" not in refused.output


def test_a_dry_run_starts_nothing(tmp_path: Path, inputs: Path) -> None:
    dry = train(tmp_path / "run", inputs, "--dry-run")
    assert dry.code == 0
    assert "trainer ranks" in dry.output
    assert not (tmp_path / "run").exists()


def test_what_is_not_a_run_has_no_ledger(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_rl.cli", "ledger", str(tmp_path)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert refused.returncode == 1
    assert "is not the directory of a run" in refused.stderr
