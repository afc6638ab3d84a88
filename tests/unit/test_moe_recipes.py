"""The recipes of configs/ for mixture-of-experts models: they resolve, and by the plan's estimate they fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import Config, HfConfig, load_config, make_plan, read_hf_config
from megatron_rl.config.plan_memory import stage_memory

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "tests" / "model_configs"
RECIPES = {"qwen3_30b_a3b": 30_532_122_624, "qwen3_235b_a22b": 235_093_634_560, "deepseek_v3": 671_026_404_352}
"""Parameters of each model, as its weight files have them."""
H200 = {
    name: [
        word
        for line in (ROOT / "configs" / f"{name}_gspo.yaml").read_text("utf-8").splitlines()
        for word in line.removeprefix("#").split()
        if line.startswith("#   ") and "=" in word and "..." not in word and not line.startswith("#   megatron-rl")
    ]
    for name in RECIPES
}
"""The overrides for larger devices, as the comments give them."""


def recipe(name: str, *overrides: str) -> tuple[Config, HfConfig]:
    words = [f"model.path={MODELS / name}", "run_dir=runs/x", "data.prompts=x.jsonl", *overrides]
    cfg = load_config(ROOT / "configs" / f"{name}_gspo.yaml", words)
    return cfg, read_hf_config(cfg.model.path)


DOCUMENTED = [
    ("qwen3_30b_a3b", []),
    ("qwen3_235b_a22b", []),
    ("qwen3_235b_a22b", H200["qwen3_235b_a22b"]),
    ("deepseek_v3", []),
    ("deepseek_v3", H200["deepseek_v3"]),
]
CASES = [(name, ()) for name in RECIPES] + [(name, tuple(words)) for name, words in H200.items() if words]


@pytest.mark.parametrize(("name", "overrides"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_recipe_fits_its_devices_with_room_to_spare(name: str, overrides: tuple[str, ...]) -> None:
    cfg, hf = recipe(name, *overrides)
    size = cfg.cluster.device_memory_gib
    assert size == (141 if overrides else 80)
    stages = range(cfg.parallel.pipeline_model_parallel_size)
    peaks = [stage_memory(cfg, hf, stage).peak / 2**30 for stage in stages]
    assert max(peaks) < 0.85 * size  # a tenth for the allocator, some for NCCL and kernels
    rows = [row for rows in make_plan(cfg, hf).values() for row in rows]
    assert [row for row in rows if "DOES NOT FIT" in row[2]] == []


@pytest.mark.parametrize("name", RECIPES)
def test_the_plan_counts_what_the_weight_files_hold(name: str) -> None:
    cfg, hf = recipe(name)
    rows: dict[str, Any] = {row[0]: row for row in make_plan(cfg, hf)["Layout"]}
    assert f"{RECIPES[name]:,} parameters" in rows["model"][1]


def test_the_documented_memory_is_that_of_the_plan() -> None:
    """Rows of the table in docs/moe.md, in the order of `DOCUMENTED`."""
    text = (ROOT / "docs" / "moe.md").read_text("utf-8")
    shown = re.findall(r"^\| .* \| (\d+) % of (\d+) GiB \|$", text, re.M)
    planned = []
    for name, overrides in DOCUMENTED:
        cfg, hf = recipe(name, *overrides)
        rows = {row[0]: row[2] for row in make_plan(cfg, hf)["Memory per rank"]}
        planned += re.findall(r"(\d+)% of the (\d+) GiB", rows["together at the peak"])
    assert shown == planned
