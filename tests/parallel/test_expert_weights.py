"""One launch of four ranks loads, exports and writes models with experts in many layouts; out comes what went in."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.parallel.launch import run_ranks
from tests.parallel.policy_setup import layout, make_config
from tests.tiny import Family, tiny_model

pytestmark = pytest.mark.parallel

RANKS = 4
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2, ETP2 = {"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep1": {"data_parallel_size": 4},
    "ep2": {"data_parallel_size": 4} | EP2,
    "ep4": {"data_parallel_size": 4, "expert_model_parallel_size": 4},
    "pp2 ep2": {"pipeline_model_parallel_size": 2, "data_parallel_size": 2} | EP2,
    "ep2 etp2": {"data_parallel_size": 4} | EP2 | ETP2,
    "tp2 ep1": TP2 | {"data_parallel_size": 2},
    "tp2 ep2": TP2 | {"data_parallel_size": 2} | EP2,
    "tp2 ep4": TP2 | {"data_parallel_size": 2, "expert_model_parallel_size": 4},
    "tp2 etp2": TP2 | {"data_parallel_size": 2} | ETP2,
    "tp2 ep2 etp2": TP2 | {"data_parallel_size": 2} | EP2 | ETP2,
    "tp2 pp2 ep2": TP2 | {"pipeline_model_parallel_size": 2} | EP2,
}
WRITTEN = ("ep2", "pp2 ep2", "tp2 ep2 etp2")
FAMILIES: tuple[Family, ...] = ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe")
CASES = [(family, name) for family in FAMILIES for name in LAYOUTS if family == "qwen3_moe" or name in WRITTEN]
"""What a layout does beyond those that are written does not depend on the family's names."""
BUCKET_BYTES = 100_000
"""Several buckets of dense parameters and several of each rank's experts."""


@dataclass
class Found:
    """What a rank has exported.

    Attributes:
        names: in their order.
        wrong: names of those that are not what the source holds, bit for bit.
        collectives: calls of torch.distributed while buckets were made, and how many buckets they were.
    """

    names: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    collectives: int = 0
    buckets: int = 0


def run_all(paths: dict[Family, Path], folder: Path) -> dict[tuple[str, str], Found]:
    """In a rank: all cases."""
    from megatron_rl.config import read_hf_config
    from megatron_rl.policy import distributed
    from megatron_rl.policy.model import build_model
    from megatron_rl.weights.load import load_hf_weights
    from megatron_rl.weights.version_dir import version_path, write_version

    found: dict[tuple[str, str], Found] = {}
    for family, name in CASES:
        path = paths[family]
        cfg = make_config(path, LAYOUTS[name])
        with layout(cfg):
            hf = read_hf_config(path)
            chunks = build_model(hf, cfg.model, cfg.parallel)
            load_hf_weights(chunks, hf, path)
            found[family, name] = export(chunks, hf, load_file(path / "model.safetensors"))
            if name in WRITTEN:
                out = version_path(folder / family / name, 1)
                write_version(chunks, hf, path, out, bucket_bytes=BUCKET_BYTES)
                in_fp8 = write_version(chunks, hf, path, out.with_name("fp8"), torch.float8_e4m3fn, BUCKET_BYTES)
                load_hf_weights(chunks, read_hf_config(in_fp8), in_fp8)
                found[family, f"{name} fp8"] = export(chunks, hf, dequantised(in_fp8))
    distributed.shutdown()
    return found


def export(chunks: list[Any], hf: Any, source: dict[str, torch.Tensor]) -> Found:
    from megatron_rl.weights.export import export_buckets, export_hf_weights, plan_export
    from megatron_rl.weights.place import Place

    found = Found()
    for name, tensor in export_hf_weights(chunks, hf):
        found.names.append(name)
        found.wrong += [] if torch.equal(tensor, source[name]) else [name]
    plan, place = plan_export(chunks, hf, None, BUCKET_BYTES), Place.of_this_rank()
    with counted() as calls:
        for _ in export_buckets(plan, "cpu" if place.sends else None, place):
            found.buckets += 1
    found.collectives = calls.total()
    return found


def dequantised(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a directory in fp8 blocks, in fp32."""
    from megatron_rl.weights.fp8 import SUFFIX, dequantise

    stored = all_tensors(folder)
    scales = {name.removesuffix(SUFFIX): stored.pop(name) for name in list(stored) if name.endswith(SUFFIX)}
    return {n: dequantise(t, scales[n]) if n in scales else t.float() for n, t in stored.items()}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Calls of collectives."""
    import torch.distributed as dist

    calls: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in ("broadcast", "all_gather_into_tensor", "all_gather", "gather")}

    def count(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return originals[name](*args, **options)

        return call

    for name in originals:
        setattr(dist, name, count(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


# ---------------------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: tiny_model(folder / family, family, layers=4) for family in FAMILIES}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("written")


@pytest.fixture(scope="module")
def results(paths: dict[Family, Path], written: Path) -> list[dict[tuple[str, str], Found]]:
    return run_ranks(RANKS, run_all, paths, written, timeout=300)


# ---------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize(("family", "name"), [*CASES, *((f, f"{name} fp8") for f in FAMILIES for name in WRITTEN)])
def test_export_gives_back_the_checkpoint_bit_for_bit(
    family: Family, name: str, results: list[Any], paths: dict[Family, Path]
) -> None:
    everything = load_file(paths[family] / "model.safetensors").keys()
    per_rank = [result[family, name] for result in results]
    assert all(found.wrong == [] for found in per_rank)
    assert {n for found in per_rank for n in found.names} == everything
    stages = 2 if "pp2" in name else 1
    assert sum(len(found.names) for found in per_rank) == RANKS // stages * len(everything)  # no tensor twice


@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_come_last_and_many_of_them_with_one_collective(name: str, results: list[Any]) -> None:
    for result in results:
        found = result["qwen3_moe", name]
        is_expert = [".experts." in tensor for tensor in found.names]
        assert is_expert == sorted(is_expert)
        assert 3 * found.buckets < len(found.names)
        # At most: over gloo one for each rank that gathers, and one that hands the bucket on.
        assert found.collectives <= 3 * found.buckets


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_written_version_is_the_checkpoint(
    family: Family, name: str, results: list[Any], written: Path, paths: dict[Family, Path]
) -> None:
    source, found = load_file(paths[family] / "model.safetensors"), all_tensors(written / family / name / "v000001")
    assert found.keys() == source.keys()
    assert [n for n in source if not torch.equal(found[n], source[n])] == []


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_of_layers_are_written_in_fp8_blocks_and_nothing_else_is(
    family: Family, name: str, results: list[Any], written: Path, paths: dict[Family, Path]
) -> None:
    from megatron_rl.weights.fp8 import SUFFIX, quantise

    source, found = load_file(paths[family] / "model.safetensors"), all_tensors(written / family / name / "fp8")
    config = json.loads((written / family / name / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert config["torch_dtype"] == "bfloat16"
    matrices = {n for n, t in source.items() if t.dim() == 2 and n.startswith("model.layers.") and ".gate.w" not in n}
    assert found.keys() == source.keys() | {n + SUFFIX for n in matrices}
    for tensor, original in source.items():
        if tensor in matrices:
            values, scales = quantise(original)
            assert torch.equal(found[tensor].float(), values.float()), tensor
            assert torch.equal(found[tensor + SUFFIX], scales), tensor
        else:
            kept = original if tensor.endswith("e_score_correction_bias") else original.bfloat16()
            assert torch.equal(found[tensor], kept), tensor


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found
