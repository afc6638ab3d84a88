"""A tiny mixture of experts through the whole circle: experts over ranks, the engine's routing replayed, GSPO."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from tests.contract.servers import NO_SGLANG, SGLANG

from .runs import ROOT, FinishedRun, make_inputs, run_tool, train

pytestmark = pytest.mark.e2e
CONFIG = ROOT / "configs" / "tiny_moe_gspo.yaml"
SHORT = (
    "steps=3",
    "sft.max_steps=10",
    "sft.stop_value=null",
    "rollout.groups_per_step=8",
    "rollout.group_size=4",
    "rollout.dynamic_sampling=off",
    "rollout.segment_tokens=3",  # routes of a response come in pieces
    "rollout.request_timeout_s=300",
    "rollout.step_timeout_s=600",
    "eval.prompts=32",
    "eval.every=0",
    "checkpoint.every=0",
    # So early only the format differs between the samples of a group.
    "reward.components=[{name: sorting, correctness: true}, {name: sorting_format}]",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs") / "moe"
    return make_inputs(folder, prompts=256, eval_prompts=64, sft_prompts=256, experts=8)


def shapes(model: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "numpy") as opened:
            found |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    return found


def assert_engine_and_trainer_route_alike(run: FinishedRun, inputs: Path, *, newest_on_disk: int = 3) -> None:
    """Every row that was read is replayed, and is what the trainer would have chosen; so are the log-probs."""
    assert run.code == 0, run.output
    assert [row["step"] for row in run.steps] == [1, 2, 3]
    for row in run.steps:
        assert row["gap/max_abs"] < 1e-5
        assert row["routing/live_rows"] == 0
        assert row["routing/mismatch_engine"] < 1e-3  # two experts whose scores are equal to the last digits
        assert 0 < row["routing/entropy"] < 2.08  # log 8
        assert row["optimizer/skipped"] == 0
    # The second of two updates; whether it moves a sequence far enough to be clipped is up to what was drawn.
    assert max(row["policy/kl_old"] for row in run.steps) > 0
    for step in range(3):
        table = pq.read_table(run.folder / "rollouts" / f"step-{step + 1:06d}.parquet")
        assert set(table["weight_version_first"].to_pylist()) == {step}
        assert set(table["weight_version_last"].to_pylist()) == {step}
    newest = max((run.folder / "weights").glob("v*"))
    assert newest.name == f"v{newest_on_disk:06d}"
    assert shapes(newest) == shapes(inputs / "model")


def test_three_steps_over_two_expert_ranks_agree_with_the_engine(tmp_path: Path, inputs: Path) -> None:
    run = train(tmp_path / "run", inputs, *SHORT, config=CONFIG)
    assert_engine_and_trainer_route_alike(run, inputs)


@pytest.mark.slow
def test_experts_and_pipeline_stages_on_four_ranks_agree_with_the_engine(tmp_path: Path, inputs: Path) -> None:
    """Each stage reads the routes of its own layer; layers differ in what they choose."""
    words = (
        "parallel.tensor_model_parallel_size=1",
        "parallel.sequence_parallel=false",
        "parallel.pipeline_model_parallel_size=2",
        "parallel.data_parallel_size=2",
    )
    run = train(tmp_path / "run", inputs, *SHORT, *words, config=CONFIG)
    assert_engine_and_trainer_route_alike(run, inputs)


@pytest.mark.slow
def test_context_parallel_ranks_with_experts_agree_with_the_engine(tmp_path: Path, inputs: Path) -> None:
    """Each rank reads the routes of its own rows of every sequence."""
    words = (
        "parallel.tensor_model_parallel_size=1",
        "parallel.sequence_parallel=false",
        "parallel.context_parallel_size=2",
    )
    run = train(tmp_path / "run", inputs, *SHORT, *words, config=CONFIG)
    assert_engine_and_trainer_route_alike(run, inputs)


@pytest.mark.skipif(not SGLANG.exists(), reason=NO_SGLANG)
@pytest.mark.parametrize("transport", ["disk", pytest.param("broadcast", marks=pytest.mark.slow)])
def test_three_steps_agree_with_a_real_sglang(tmp_path: Path, inputs: Path, transport: str) -> None:
    """Its experts, by its own words, are those that the trainer uses."""
    words = ("engine.kind=sglang", f"engine.python={SGLANG}", f"engine.weight_transport={transport}")
    run = train(tmp_path / "run", inputs, *SHORT, *words, config=CONFIG, timeout=900)
    # A broadcast leaves on disk what an engine starts from, and nothing more.
    assert_engine_and_trainer_route_alike(run, inputs, newest_on_disk=3 if transport == "disk" else 0)


@pytest.mark.slow
def test_sixty_steps_of_gspo_with_replay_learn_to_sort(tmp_path: Path) -> None:
    """Held-out pass@1 leaves the interval that it had after the warm-up."""
    inputs = make_inputs(tmp_path / "inputs", experts=8)
    run = train(tmp_path / "run", inputs, config=CONFIG, timeout=1500)
    assert run.code == 0, run.output
    print(f"sixty steps: {run.result['train_seconds']:.0f} s")
    assert run.result["pass_at_1_after_interval"][0] > run.result["pass_at_1_before_interval"][1]
    assert re.search(r"pass@1 +0\.\d+ +[01]\.\d+", run.output)
    assert max(row["routing/live_rows"] for row in run.steps) == 0


@pytest.mark.slow
def test_the_study_of_ratios_measures_replay_alone(tmp_path: Path) -> None:
    """With an fp32 engine R2 and R3 are the same sets; before the first update all ratios are 1, the gap is noise."""
    words = (
        "--seeds=1",
        "--warm-up=20",
        "--prompts=8",
        "--group-size=4",
        "--lr",
        "1e-5",
        f"--plot={tmp_path / 'x.svg'}",
    )
    printed = run_tool("study_moe_ratio.py", *words, timeout=900)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("| ")]
    table = {(row[0], row[2]): row for row in rows if row[1] == "1e-05"}
    assert set(table) == {(e, u) for e in ("float32", "bfloat16") for u in ("0", "1", "2", "4", "8")}
    before, after = table["float32", "0"], table["float32", "8"]
    assert (before[3], before[4], before[6]) == ("0.00% / 0.00%", "0.0e+00", "0.0e+00")
    assert max(float(gap) for gap in before[9].split(" / ")) < 1e-5
    assert len(set(after[5].split(" / "))) == 1
    assert float(after[4]) > 0
    assert (tmp_path / "x.svg").read_text("utf-8").count("<polyline") == 6
