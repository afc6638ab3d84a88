"""What a dry run says of memory, and what it needs for that."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.config import Config, ConfigError, HfConfig, check, load_config, make_plan
from megatron_rl.config.plan_memory import stage_memory
from megatron_rl.data.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, VOCABULARY, EXPERT, EXPERTS = 128, 64, 3 * 128 * 128, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "moe"
    write_tiny_model(folder, seed=0, experts=EXPERTS)
    (folder / "model.safetensors").unlink()
    return folder


def planned(model: Path, *words: str) -> tuple[Config, HfConfig]:
    cfg = load_config(ROOT / "configs" / "tiny_moe_gspo.yaml", [f"model.path={model}", *words])
    return cfg, check(cfg, with_files=False)


def memory(model: Path, *words: str) -> dict[str, tuple[str, str]]:
    rows = make_plan(*planned(model, *words))["Memory per rank"]
    return {name: (value, how) for name, value, how in rows}


def test_stages_are_named_as_they_are_counted_and_large_sizes_are_in_tib() -> None:
    words = [f"model.path={ROOT}/tests/model_configs/qwen3_235b_a22b", "run_dir=r", "data.prompts=x"]
    cfg = load_config(ROOT / "configs" / "qwen3_235b_a22b_gspo.yaml", words)
    sections = make_plan(cfg, check(cfg, with_files=False))
    rows = {name: (value, how) for section in sections.values() for name, value, how in section}
    assert rows["fullest pipeline stage"][0] == "stage 1"
    assert rows["layers per rank"][1] == "of each stage, from stage 0 on, in 1 chunk(s)"
    assert rows["one checkpoint"][0] == "2.993 TiB"
    assert rows["weights to each engine"][0] == "437.896 GiB"


def test_a_plan_of_a_model_that_is_not_there_asks_for_no_weights(tmp_path: Path) -> None:
    words = ["run_dir=r", "vars.inputs=x", f"model.path={tmp_path}", "--dry-run"]
    said = CliRunner().invoke(app, ["train", str(ROOT / "configs" / "tiny_moe_gspo.yaml"), *words])
    assert "no config.json there" in str(said.exception)
    assert "for a plan (--dry-run) this file alone will do" in str(said.exception)


@pytest.mark.parametrize(
    ("tp", "chunk", "rows", "columns"), [(1, 512, 512, 96), (2, 512, 2 * 512, 48), (1, 10**6, 2000, 96)]
)
def test_logits_are_those_of_a_chunk_with_the_padded_vocabulary(
    model: Path, tp: int, chunk: int, rows: int, columns: int
) -> None:
    """64 ids padded to a multiple of 48 on each tensor-parallel rank; never more tokens than a micro-batch holds."""
    words = [
        "model.make_vocab_size_divisible_by=48",
        f"parallel.tensor_model_parallel_size={tp}",
        f"parallel.sequence_parallel={str(tp > 1).lower()}",
        "parallel.expert_model_parallel_size=1",
        f"loss.chunk_tokens={chunk}",
        "algorithm.max_tokens_per_microbatch=2000",
    ]
    assert memory(model, *words)["logits at their peak"][0] == f"{rows * columns * 4 / 2**20:.3f} MiB"


def test_optimizer_state_of_experts_is_shared_by_their_copies_only(model: Path) -> None:
    """TP2 x DP4 over EP4: dense parameters have 4 holders, each expert 2. Moments of fp32 take 8 bytes a parameter."""
    cfg, hf = planned(model, "parallel.data_parallel_size=4", "parallel.expert_model_parallel_size=4")
    found = stage_memory(cfg, hf, 0)
    assert found.shard.expert == 2 * EXPERTS // 4 * EXPERT
    assert found.optimizer == 8 * (found.shard.dense / 4 + found.shard.expert / 2)
    assert found.gradients == 4 * found.shard.total
    cfg, hf = planned(model, "parallel.data_parallel_size=4", "parallel.use_distributed_optimizer=false")
    assert stage_memory(cfg, hf, 0).optimizer == 8 * stage_memory(cfg, hf, 0).shard.total


def test_early_pipeline_stages_keep_more_micro_batches(model: Path) -> None:
    words = [
        "parallel.pipeline_model_parallel_size=2",
        "algorithm.max_tokens_per_microbatch=64",
        "loss.chunk_tokens=64",
    ]
    cfg, hf = planned(model, *words)
    first, last = (stage_memory(cfg, hf, stage) for stage in range(2))
    assert (first.in_flight, last.in_flight) == (2, 1)
    assert first.activations == 2 * last.activations
    assert first.logits == 0
    full = stage_memory(*planned(model, *words, "parallel.recompute=full"), 0)
    assert full.activations < first.activations
    shared = stage_memory(*planned(model, *words, "parallel.context_parallel_size=2"), 0)
    assert shared.activations == first.activations / 2


def test_what_does_not_fit_is_said(model: Path) -> None:
    name = "together at the peak"
    assert memory(model)[name][1] == "not compared: cluster.device_memory_gib is not set"
    assert "DOES NOT FIT" not in memory(model, "cluster.device_memory_gib=80")[name][1]
    assert memory(model, "cluster.device_memory_gib=0.001")[name][1].endswith("of a device: DOES NOT FIT")


def test_routes_on_disk_are_those_of_all_groups_alive_and_of_what_checkpoints_keep(model: Path) -> None:
    """Two layers x 2 experts x 1 byte a token."""
    words = ["rollout.groups_per_step=10", "rollout.group_size=6", "rollout.oversample=1.25"]
    for more, groups in (
        ([], 13 + 3 * 3),
        (["checkpoint.keep_last=1", "checkpoint.keep_best=false"], 13 + 3),
        (["rollout.mode=async", "rollout.max_staleness=2", "deterministic=false"], 39 + 3 * 39),
    ):
        cfg, hf = planned(model, *words, *more)
        rows = [row for found in make_plan(cfg, hf).values() for row in found]
        (value, how) = next((value, how) for name, value, how in rows if name == "routes on disk")
        longest = cfg.rollout.max_prompt_tokens + cfg.rollout.max_response_tokens
        assert value == f"{groups * 6 * longest * 4 / 2**20:.3f} MiB", how
        assert how.startswith("at most: 4 bytes a token; ")


def test_a_plan_needs_no_weights_but_a_run_does(model: Path) -> None:
    words = [str(ROOT / "configs" / "tiny_moe_gspo.yaml"), f"model.path={model}", "data.prompts=nowhere.jsonl"]
    shown = CliRunner().invoke(app, ["train", *words, "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert "holds no weights: neither model files nor prompts were checked" in shown.output
    assert "8 in 2 layers, 2 a token" in shown.output
    assert "routes on disk" in shown.output
    there = [f"{key}={model / 'config.json'}" for key in ("data.prompts", "data.eval_prompts", "sft.data")]
    started = CliRunner().invoke(app, ["train", *words, *there])
    assert isinstance(started.exception, ConfigError)
    assert "model.safetensors: file is missing" in str(started.exception)
