"""Hugging Face -> Megatron -> Hugging Face over random small models: the same bits, whatever the layout."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron_rl.config import HfConfig, read_hf_config
from megatron_rl.config.shards import num_parameters
from megatron_rl.weights import WeightsError
from megatron_rl.weights.convert import actions
from megatron_rl.weights.convert.compare import compare
from megatron_rl.weights.convert.cuts import TargetLayout, cut
from megatron_rl.weights.convert.hf_target import HfTarget
from megatron_rl.weights.convert.listing import describe
from megatron_rl.weights.convert.opened import open_checkpoint
from megatron_rl.weights.convert.stored_names import stored_at
from megatron_rl.weights.convert.torch_dist import TorchDistReader
from megatron_rl.weights.convert.torch_dist_target import Slab, TorchDistTarget
from megatron_rl.weights.convert.views import as_megatron
from megatron_rl.weights.families import FAMILIES, family_of
from megatron_rl.weights.layouts import Shard
from megatron_rl.weights.reader import SafetensorsReader
from tests.convert_models import convert, silent, write_config, write_model


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    groups = draw(st.integers(1, 4))
    family = draw(st.sampled_from(sorted(FAMILIES)))
    heads, head_dim = groups * draw(st.integers(1, 4)), 2 * draw(st.integers(1, 4))
    head_dim *= 2 if family == "glm4_moe" else 1  # half of it is rotated
    layers = draw(st.integers(1, 5))
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "num_key_value_heads": groups,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "hidden_size": draw(st.integers(1, 20)),
        "intermediate_size": 2 * draw(st.integers(1, 10)),
        "vocab_size": draw(st.integers(1, 70)),
        "tie_word_embeddings": draw(st.booleans()),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
    } | draw(experts(family, layers))


@st.composite
def experts(draw: st.DrawFn, family: str, layers: int) -> dict[str, Any]:
    """What the families with experts have besides; some of their layers may have none."""
    count, size = draw(st.integers(2, 6)), 2 * draw(st.integers(1, 6))
    if family == "qwen3_moe":
        dense = draw(st.lists(st.integers(0, layers - 1), unique=True))
        found = {
            "num_experts": count,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": size,
            "mlp_only_layers": dense,
        }
    elif family == "mixtral":
        found = {"num_local_experts": count, "num_experts_per_tok": 2, "intermediate_size": size}
    elif family in ("deepseek_v2", "deepseek_v3", "glm4_moe"):
        found = {
            "n_routed_experts": count,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": size,
            "n_shared_experts": draw(st.integers(0, 2)),
            "first_k_dense_replace": draw(st.integers(0, layers)),
            "n_group": 1,
            "topk_group": 1,
        }
    else:
        found = {}
    if family == "glm4_moe":
        found |= {"attention_bias": draw(st.booleans()), "use_qk_norm": draw(st.booleans())}
    elif family.startswith("deepseek"):
        found |= {
            "q_lora_rank": draw(st.none() | st.integers(1, 8)),
            "kv_lora_rank": draw(st.integers(1, 8)),
            "qk_nope_head_dim": draw(st.integers(1, 8)),
            "qk_rope_head_dim": 2 * draw(st.integers(1, 4)),
            "v_head_dim": draw(st.integers(1, 8)),
        }
    return found


def layouts(draw: Any, model: dict[str, Any], hf: HfConfig) -> TargetLayout:
    """Any layout in which this model can be trained."""
    layers, experts = hf.num_layers, hf.moe.num_experts if hf.moe else 1
    first, last = draw(st.none() | st.integers(1, 2)), draw(st.none() | st.integers(1, 2))
    pipelines = [pp for pp in range(1, layers + 1) if can_deal(layers, TargetLayout(1, pp, first=first, last=last))]
    if not pipelines:
        first = last = None
    pp = draw(st.sampled_from(pipelines or [1]))
    chunks = [v for v in (None, 2, 3) if can_deal(layers, TargetLayout(1, pp, 128, v, first, last))]
    return TargetLayout(
        draw(st.sampled_from(rank_counts(model, hf))),
        pp,
        draw(st.sampled_from([1, 8, 128])),
        draw(st.sampled_from(chunks)),
        first,
        last,
        draw(st.sampled_from([n for n in (1, 2, 3) if experts % n == 0])),
        draw(st.sampled_from([1, 2])) if hf.moe else 1,
    )


def can_deal(layers: int, layout: TargetLayout) -> bool:
    try:
        return bool(layout.stages(layers))
    except WeightsError:
        return False


@dataclass(frozen=True)
class Unwritten:
    """A tensor of which only name and shape exist."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    def rows(self, begin: int, end: int) -> torch.Tensor:
        raise AssertionError("a plan reads nothing")


def rank_counts(model: dict[str, Any], hf: HfConfig) -> list[int]:
    heads, groups = model["num_attention_heads"], model["num_key_value_heads"]
    rows = (heads + 2 * groups) * model["head_dim"]
    shared = hf.moe.shared_ffn_hidden_size if hf.moe else 0
    return [
        tp
        for tp in range(1, 9)
        if heads % tp == 0
        and model["intermediate_size"] % tp == 0
        and shared % tp == 0
        and (hf.mla is not None or (rows % tp == 0 and (groups % tp == 0 or tp % groups == 0)))
    ]


@settings(max_examples=25, deadline=None)
@given(models(), st.data())
def test_converting_there_and_back_gives_the_same_bits(model: dict[str, Any], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors = write_model(folder / "hf", **model)
        layout = layouts(data.draw, model, read_hf_config(folder / "hf"))
        convert(actions.hf_to_megatron(open_checkpoint(folder / "hf"), folder / "megatron", layout, None))
        convert(actions.megatron_to_hf(open_checkpoint(folder / "megatron"), folder / "back", None))
        back = load_file(folder / "back" / "model.safetensors")
        assert back.keys() == tensors.keys()
        assert all(torch.equal(back[n].view(torch.uint8), tensors[n].view(torch.uint8)) for n in tensors)
        found = compare(open_checkpoint(folder / "megatron"), open_checkpoint(folder / "hf"), silent)
        assert found.is_equal
        assert len(found.differences) == len(tensors)


@settings(max_examples=25, deadline=None)
@given(models())
def test_the_whole_parameter_is_what_the_ranks_hold_together(model: dict[str, Any]) -> None:
    """The table's two readings, by pieces for files and by shards for ranks, describe one parameter."""
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name) / "hf", **model)
        hf, reader = read_hf_config(Path(name) / "hf"), SafetensorsReader(Path(name) / "hf")
        for tp in rank_counts(model, hf):
            padded = -hf.vocab_size % tp + hf.vocab_size
            stored = as_megatron({n: reader[n] for n in reader.names}, hf, padded)
            for row in family_of(hf).rows(hf):
                name, index = stored_at(row, hf)
                plane = stored[name][index]
                whole = plane.rows(0, plane.shape[0])
                layout = row.rule.layout
                if row.expert is not None and hf.moe and hf.moe.ffn_hidden_size % tp:
                    continue
                sources = [reader[n] for n in row.hf]
                ranks = tp if layout.is_split else 1
                rows = whole.shape[0] // ranks
                shards = [layout.local(sources, Shard(rank, ranks, rows), hf) for rank in range(ranks)]
                for n, tensor in zip(row.hf, layout.full(shards, hf), strict=True):
                    assert torch.equal(tensor, reader[n].rows(0, reader[n].shape[0]))
                if tp == 1:
                    assert torch.equal(shards[0], whole)


def test_many_files_come_with_a_correct_index_and_all_companions(tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "hf")
    plan = actions.cast(open_checkpoint(tmp_path / "hf"), tmp_path / "out", torch.bfloat16, 3000)
    told: list[int] = []
    plan.run(told.append)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    size = 0
    for file in files:
        for name, tensor in load_file(tmp_path / "out" / file).items():
            assert index["weight_map"][name] == file
            assert torch.equal(tensor, tensors[name].bfloat16())
            size += tensor.nbytes
    assert index["metadata"]["total_size"] == size == plan.size == sum(told)
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_directory_of_links_is_read_like_one_of_files(tmp_path: Path) -> None:
    """As in the cache of huggingface_hub: every name is a link to a blob."""
    tensors = write_model(tmp_path / "real")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, file in enumerate(sorted((tmp_path / "real").iterdir())):
        file.rename(tmp_path / "blobs" / str(number))
        (tmp_path / "snapshot" / file.name).symlink_to(Path("..") / "blobs" / str(number))
    convert(actions.cast(open_checkpoint(tmp_path / "snapshot"), tmp_path / "out", torch.float32))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_the_average_is_computed_in_fp32_and_rounded_once(tmp_path: Path) -> None:
    sides = [write_model(tmp_path / str(seed), seed, torch.bfloat16) for seed in (1, 2, 3)]
    opened = [open_checkpoint(tmp_path / str(seed)) for seed in (1, 2, 3)]
    convert(actions.average(opened, [2.0, 1.0, 1.0], tmp_path / "mean"))
    for name, tensor in load_file(tmp_path / "mean" / "model.safetensors").items():
        a, b, c = (side[name].float() for side in sides)
        assert torch.equal(tensor, (a * 0.5 + b * 0.25 + c * 0.25).bfloat16())


def test_differences_are_sorted_and_named(tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "a")
    write_model(tmp_path / "b")
    tensors["model.norm.weight"][3] += 0.5
    tensors["lm_head.weight"][49, 15] = float("nan")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    found = compare(open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b"), silent)
    assert [row.name for row in found.differences[:3] if row.max_abs] == ["lm_head.weight", "model.norm.weight"]
    assert found.differences[0].max_abs == float("inf")
    assert found.differences[1].max_abs == pytest.approx(0.5, rel=1e-6)
    assert found.only_second == ["model.layers.1.mlp.up_proj.weight"]
    assert not found.is_equal


def test_a_listing_says_shapes_sizes_and_cuts(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", dtype=torch.bfloat16)
    convert(actions.hf_to_megatron(open_checkpoint(tmp_path / "hf"), tmp_path / "m", TargetLayout(2, 2), None))
    lines = {line.name: line for line in describe(open_checkpoint(tmp_path / "m"))[0]}
    assert lines["decoder.layers.mlp.linear_fc1.weight"].cut == "8 chunks (2 x 4 x 1)"
    assert lines["decoder.layers.mlp.linear_fc2.weight"].cut == "4 chunks (2 x 1 x 2)"
    assert lines["embedding.word_embeddings.weight"].shape == (256, 16)
    assert describe(open_checkpoint(tmp_path / "hf"))[1][0] == "Hugging Face safetensors; 21 tensors in 1 files"


def test_tensors_of_any_rank_are_read_from_a_checkpoint_that_torch_wrote(tmp_path: Path) -> None:
    """Experts have a dimension more, counts of layers one less; torch's own writer is not the one of this package."""
    state = {
        "decoder.layers.mlp.experts.linear_fc1.weight": torch.randn(3, 4, 6, 5),
        "decoder.layers.mlp.expert_bias": torch.randn(3, 4),
        "decoder.layers.count": torch.arange(3.0),
        "decoder.final_layernorm.weight": torch.randn(7).to(torch.bfloat16),
    }
    dcp.save(state, checkpoint_id=tmp_path / "torch", no_dist=True)
    reader = TorchDistReader(tmp_path / "torch")
    for name, tensor in state.items():
        planes = [plane.rows(0, plane.shape[0]) for plane in reader.tensors[name].planes]
        assert torch.equal(torch.stack(planes).reshape(tensor.shape), tensor), name
        assert torch.equal(reader.tensors[name].planes[0].rows(1, 3), planes[0][1:3])
    dcp.save({"step": torch.tensor(1.0)}, checkpoint_id=tmp_path / "scalar", no_dist=True)
    with pytest.raises(WeightsError, match="step: a single number"):
        TorchDistReader(tmp_path / "scalar").tensors["step"].planes  # noqa: B018


def test_a_model_of_405_billion_parameters_is_planned_from_its_config_alone(tmp_path: Path) -> None:
    hf = write_config(
        tmp_path / "hf",
        num_hidden_layers=126,
        hidden_size=16384,
        intermediate_size=53248,
        num_attention_heads=128,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
    )
    tensors = {name: Unwritten(name, shape) for name, shape in family_of(hf).hf_shapes(hf).items()}
    there = as_megatron(tensors, hf, 128256 + 768)
    layout = TargetLayout(8, 9)
    cuts = {name: cut(name, planes, layout, layout.stages(126)) for name, planes in there.items()}
    files = TorchDistTarget(cuts, {}, {}).files
    assert sum(file.size for file in files) == 2 * (num_parameters(hf) + 2 * 768 * 16384)
    # What 72 ranks load lies in whole chunks, of a stage's own files: none holds layers of two stages.
    stages = [
        {slab.index[0] * 9 // 126 for slab in file.tensors if isinstance(slab, Slab) and slab.index} for file in files
    ]
    assert max(len(stage) for stage in stages) == 1
    assert set.union(*stages) == set(range(9))
    assert max(file.size for file in HfTarget(tensors, tmp_path / "hf").files) <= 5 * 10**9
