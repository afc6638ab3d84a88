"""Plans of conversions: of models whose weights are not there, of each rank's reads, of names on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from megatron_rl.config import read_hf_config
from megatron_rl.config.shards import num_parameters
from megatron_rl.weights import WeightsError
from megatron_rl.weights.convert import actions, forecast
from megatron_rl.weights.convert.cuts import TargetLayout
from megatron_rl.weights.convert.forecast import rank_shares, seconds_per_byte
from megatron_rl.weights.convert.hub import local_path
from megatron_rl.weights.convert.opened import open_checkpoint
from megatron_rl.weights.convert.torch_dist_target import Slab
from tests.convert_models import convert, record_reads, write_model

CONFIGS = Path(__file__).resolve().parents[1] / "model_configs"


@pytest.mark.parametrize(
    ("model", "layout", "experts"),
    [
        ("qwen3_235b_a22b", TargetLayout(8, 16, 1, first=5, last=5, expert=64), 2),
        pytest.param("deepseek_v3", TargetLayout(8, 16, 1, first=4, last=1, expert=64), 4, marks=pytest.mark.slow),
    ],
)
def test_the_largest_models_are_planned_from_config_json_alone(
    model: str, layout: TargetLayout, experts: int, tmp_path: Path
) -> None:
    source = open_checkpoint(CONFIGS / model, weights_may_be_absent=True)
    plan = actions.hf_to_megatron(source, tmp_path / "out", layout, None)
    hf = read_hf_config(CONFIGS / model)
    bias = 2 * len(hf.moe_layers) * hf.moe.num_experts if hf.moe and hf.moe.expert_bias else 0
    assert plan.size == 2 * num_parameters(hf) + bias
    for file in plan.target.files:
        # What a rank loads lies in whole files: of one stage, and of experts those of one expert-parallel rank.
        slabs = [tensor for tensor in file.tensors if isinstance(tensor, Slab)]
        owned = {slab.index[-1] // experts for slab in slabs if ".experts.experts." in slab.key}
        assert len(owned) <= 1
        assert not owned or all(".experts.experts." in slab.key for slab in slabs)
    ranks = rank_shares(plan.target, 64)
    assert sum(share.written for share in ranks) == plan.size
    assert max(share.written for share in ranks) < 1.15 * plan.size / 64
    padding = plan.size - sum(share.read for share in ranks)
    assert 0 <= padding < 2 * 8 * 2 * hf.hidden_size  # rows of zeros for the vocabulary
    with pytest.raises(WeightsError, match=r"the weights are not there, only config.json; .* --gb-per-s"):
        seconds_per_byte(plan.target, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", ["hf-to-megatron", "megatron-to-hf", "cast", "fp8"])
def test_a_forecast_counts_the_reads_that_a_conversion_makes(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "hf")
    layout = TargetLayout(2, 2)
    if verb == "megatron-to-hf":
        convert(actions.hf_to_megatron(open_checkpoint(tmp_path / "hf"), tmp_path / "m", layout, None))
        plan = actions.megatron_to_hf(open_checkpoint(tmp_path / "m"), tmp_path / "out", None)
    elif verb == "hf-to-megatron":
        plan = actions.hf_to_megatron(open_checkpoint(tmp_path / "hf"), tmp_path / "out", layout, torch.bfloat16)
    else:
        dtype = torch.float8_e4m3fn if verb == "fp8" else torch.float16
        plan = actions.cast(open_checkpoint(tmp_path / "hf"), tmp_path / "out", dtype, 4000)
    (expected,) = rank_shares(plan.target, 1)
    reads = record_reads(monkeypatch)
    convert(plan)
    assert (expected.reads, expected.read) == (len(reads), sum(reads))


def test_the_trial_takes_a_part_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "hf")
    plan = actions.cast(open_checkpoint(tmp_path / "hf"), tmp_path / "out" / "cast", torch.float16)
    monkeypatch.setattr(forecast, "TRIAL_BYTES", 2000)
    seen: list[int] = []
    original = forecast._Trial.advance

    def advance(trial: forecast._Trial, size: int) -> None:
        seen.append(size)
        original(trial, size)

    monkeypatch.setattr(forecast._Trial, "advance", advance)
    (tmp_path / "out").mkdir()
    assert seconds_per_byte(plan.target, tmp_path / "out") > 0
    assert 2000 <= sum(seen) < plan.size
    assert not list((tmp_path / "out").iterdir())


def test_names_on_the_hub_are_found_in_its_cache_or_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--org--name"
    write_model(cached / "snapshots" / "abc123")
    (cached / "refs").mkdir()
    for revision in ("main", "v1"):
        (cached / "refs" / revision).write_text("abc123")
    assert local_path("hf://org/name") == local_path("hf://org/name@v1") == cached / "snapshots" / "abc123"
    assert open_checkpoint(local_path("hf://org/name")).hf().num_layers == 2
    assert local_path("some/folder") == Path("some/folder")
    with pytest.raises(WeightsError, match=r"hf://org/other: not in the cache .* run `hf download org/other`"):
        local_path("hf://org/other")
    with pytest.raises(WeightsError, match=r"hf:/org/name: not a name of a model; write hf://ORGANISATION/MODEL"):
        local_path("hf:/org/name")
