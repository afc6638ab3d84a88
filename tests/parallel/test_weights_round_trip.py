"""One launch of four ranks loads, exports and publishes weights in four layouts; what comes out is what went in."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parallel.dense_models import LAYOUTS, MODELS, PLAIN, RANKS, VOCAB_SIZE
from tests.parallel.launch import RankError, run_ranks, this_rank
from tests.tiny import tiny_models

pytestmark = pytest.mark.parallel

WRITTEN = (*PLAIN, "tp2-pp2-vpp2")
CASES = [(model, layout) for layout in WRITTEN for model in MODELS]
BAD = ("truncated", "wrong-shape", "unmapped")


# ------------------------------------------------------------------------------------------------------- on the ranks


@dataclass
class RankResult:
    exports: dict[tuple[str, str], list[tuple[str, torch.Tensor]]] = field(default_factory=dict)
    """(model, layout) -> (name, tensor) in the order of export."""
    wrapped: dict[str, torch.Tensor] = field(default_factory=dict)
    """Export through the data-parallel wrapper, in bfloat16."""
    errors: dict[str, str] = field(default_factory=dict)
    """What loading each damaged directory, or publishing to a forbidden one, said on this rank."""
    padding: dict[str, float] = field(default_factory=dict)
    """Largest absolute value in the padded rows of this rank's embedding, by layout (absent: no padding here)."""


def run_all(paths: dict[str, Path], bad: dict[str, Path], weights_dir: Path) -> RankResult:
    from megatron.core import parallel_state

    from megatron_rl.config.parallel import ParallelConfig
    from megatron_rl.policy import distributed

    result = RankResult()
    for layout in WRITTEN:
        parallel_cfg = ParallelConfig(**LAYOUTS[layout])
        distributed.initialize(this_rank(), parallel_cfg, seed=3, timeout_s=60)
        for model, path in paths.items():
            chunks, hf = load(path, parallel_cfg)
            exported = export(chunks, hf)
            result.exports[model, layout] = [(name, tensor.clone()) for name, tensor in exported]
            record_padding(chunks, layout, result)
        publish(paths["qwen3-tied"], parallel_cfg, weights_dir / layout, result)
        if layout == "tp2":
            fail_to_load(bad, parallel_cfg, result)
            result.wrapped = export_wrapped(paths["qwen3"], parallel_cfg)
        if layout == "pp2":
            fail_to_publish(paths["qwen3"], parallel_cfg, weights_dir / "forbidden", result)
        parallel_state.destroy_model_parallel()
    distributed.shutdown()
    return result


def load(path: Path, parallel_cfg: Any, dtype: str = "float32") -> tuple[list[Any], Any]:
    from megatron_rl.config import read_hf_config
    from megatron_rl.config.model import ModelConfig
    from megatron_rl.policy.model import build_model
    from megatron_rl.weights.load import load_hf_weights

    hf = read_hf_config(path)
    chunks = build_model(hf, ModelConfig(path=str(path), dtype=dtype), parallel_cfg)
    load_hf_weights(chunks, hf, path)
    return chunks, hf


def export(chunks: list[Any], hf: Any) -> list[tuple[str, torch.Tensor]]:
    from megatron_rl.weights.export import export_hf_weights

    return list(export_hf_weights(chunks, hf))


def record_padding(chunks: list[Any], layout: str, result: RankResult) -> None:
    from megatron.core import parallel_state

    if not hasattr(chunks[0], "embedding"):
        return
    weight = chunks[0].embedding.word_embeddings.weight
    padded = weight[max(0, VOCAB_SIZE - parallel_state.get_tensor_model_parallel_rank() * len(weight)) :]
    if len(padded):
        result.padding[layout] = float(padded.abs().max())


def publish(path: Path, parallel_cfg: Any, out_dir: Path, result: RankResult) -> None:
    from megatron_rl.weights.version_dir import version_path, write_version

    chunks, hf = load(path, parallel_cfg, dtype="bfloat16")
    target = version_path(out_dir, 3)
    for _ in range(2):  # the second time it exists already, as after a resume
        assert write_version(chunks, hf, path, target) == target


def fail_to_publish(path: Path, parallel_cfg: Any, out_dir: Path, result: RankResult) -> None:
    """The second stage cannot write its file: its place is taken by a directory (root may write anywhere else)."""
    from megatron.core import parallel_state

    import megatron_rl.weights.version_dir as version_dir

    chunks, hf = load(path, parallel_cfg)
    original = version_dir.write_safetensors

    def full_disk(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    if parallel_state.get_pipeline_model_parallel_rank() == 1:
        version_dir.write_safetensors = full_disk
    try:
        version_dir.write_version(chunks, hf, path, version_dir.version_path(out_dir, 1))
    except version_dir.WeightsError as error:
        result.errors["full-disk"] = str(error)
    version_dir.write_safetensors = original


def fail_to_load(bad: dict[str, Path], parallel_cfg: Any, result: RankResult) -> None:
    from megatron_rl.config import read_hf_config
    from megatron_rl.config.model import ModelConfig
    from megatron_rl.policy.model import build_model
    from megatron_rl.weights import WeightsError
    from megatron_rl.weights.load import load_hf_weights

    for name, path in bad.items():
        hf = read_hf_config(path)
        chunks = build_model(hf, ModelConfig(path=str(path), dtype="float32"), parallel_cfg)
        if name == "unmapped":
            chunks[0].adapter = torch.nn.Linear(2, 2)
        try:
            load_hf_weights(chunks, hf, path)
        except WeightsError as error:
            result.errors[name] = str(error)


def export_wrapped(path: Path, parallel_cfg: Any) -> dict[str, torch.Tensor]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    from megatron_rl.weights.load import load_hf_weights

    chunks, hf = load(path, parallel_cfg, dtype="bfloat16")
    config = chunks[0].config
    wrapped = [
        DistributedDataParallel(config, DistributedDataParallelConfig(), Float16Module(config, chunk))
        for chunk in chunks
    ]
    for parameter in wrapped[0].parameters():
        parameter.data.zero_()
    load_hf_weights(wrapped, hf, path)
    return {name: tensor.clone() for name, tensor in export(wrapped, hf)}


# ---------------------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tiny_models(tmp_path_factory.mktemp("models"), MODELS, layers=4, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def bad(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bad")
    return {name: damage(name, shutil.copytree(paths["qwen3"], folder / name)) for name in BAD}


def damage(kind: str, path: Path) -> Path:
    """Of the reader and of the fit with config.json one fault each; all of them are tried where files are converted."""
    file = path / "model.safetensors"
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif kind == "wrong-shape":
        tensors = load_file(file)
        tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros(64, 96)
        save_file(tensors, file, metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def weights_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def results(paths: dict[str, Path], bad: dict[str, Path], weights_dir: Path) -> list[RankResult]:
    return run_ranks(RANKS, run_all, paths, bad, weights_dir, timeout=180)


# ---------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_export_gives_back_the_checkpoint_bit_for_bit(
    model: str, layout: str, results: list[RankResult], paths: dict[str, Path]
) -> None:
    source = load_file(paths[model] / "model.safetensors")
    exported: dict[str, torch.Tensor] = {}
    for result in results:
        names = [name for name, _ in result.exports[model, layout]]
        assert len(names) == len(set(names))
        exported |= dict(result.exports[model, layout])
    assert exported.keys() == source.keys()
    for name, tensor in source.items():
        assert torch.equal(exported[name], tensor), name


def test_pipeline_stages_export_their_own_layers_on_all_tensor_parallel_ranks(results: list[RankResult]) -> None:
    names = [{name for name, _ in result.exports["qwen3-tied", "tp2-pp2"]} for result in results]
    assert names[0] == names[1]
    assert names[2] == names[3]
    assert not names[0] & names[2]
    assert "model.embed_tokens.weight" in names[0]
    assert "lm_head.weight" not in names[2]  # tied: the last stage's copy of the embedding is not another tensor


def test_padded_vocabulary_rows_are_zero(results: list[RankResult]) -> None:
    assert {layout for result in results for layout in result.padding} == set(WRITTEN)
    assert all(value == 0 for result in results for value in result.padding.values())


def test_wrapped_bfloat16_model_exports_the_rounded_checkpoint(
    results: list[RankResult], paths: dict[str, Path]
) -> None:
    source = load_file(paths["qwen3"] / "model.safetensors")
    assert results[0].wrapped.keys() == source.keys()
    for name, tensor in source.items():
        assert torch.equal(results[0].wrapped[name], tensor.bfloat16()), name


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("wrong-shape", ["model.layers.2.mlp.down_proj.weight has shape [64, 96]", "[64, 128]"]),
        ("truncated", ["model.safetensors", "cut short", "copy the file again"]),
        ("unmapped", ["adapter.weight", "families/qwen3.py"]),
    ],
)
def test_damaged_checkpoint_is_one_plain_error_on_every_rank(
    kind: str, words: list[str], results: list[RankResult]
) -> None:
    for result in results:
        assert kind in result.errors
        for word in words:
            assert word in result.errors[kind]


@pytest.mark.parametrize("layout", WRITTEN)
def test_published_version_loads_in_transformers(layout: str, results: Any, weights_dir: Path, paths: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    version = weights_dir / layout / "v000003"
    assert os.listdir(version.parent) == ["v000003"]
    model = AutoModelForCausalLM.from_pretrained(version, dtype="auto")
    assert model.dtype is torch.bfloat16
    source = AutoModelForCausalLM.from_pretrained(paths["qwen3-tied"], dtype=torch.bfloat16)
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert AutoTokenizer.from_pretrained(version).chat_template
    pieces = len(list(version.glob("*.safetensors")))
    assert pieces == (2 if "pp2" in layout else 1)


def test_rank_that_cannot_write_fails_all_ranks_and_publishes_nothing(
    results: list[RankResult], weights_dir: Path
) -> None:
    messages = [result.errors["full-disk"] for result in results]
    assert "No space left on device" in messages[2]  # the writer of the second stage
    assert all("rank 2 failed" in message for rank, message in enumerate(messages) if rank != 2)
    assert not (weights_dir / "forbidden" / "v000001").exists()


def publish_and_die(path: Path, weights_dir: Path) -> None:
    """The process is killed after everything was written and before the directory has its name."""
    import signal

    from megatron_rl.config.parallel import ParallelConfig
    from megatron_rl.policy import distributed
    from megatron_rl.weights import version_dir

    distributed.initialize(this_rank(), ParallelConfig(), seed=3, timeout_s=60)
    chunks, hf = load(path, ParallelConfig())
    version_dir._move_into_place = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    version_dir.write_version(chunks, hf, path, version_dir.version_path(weights_dir, 2))


def test_kill_before_the_rename_leaves_no_half_version(paths: dict[str, Path], tmp_path: Path) -> None:
    from megatron_rl.weights.version_dir import list_versions, prune_versions

    with pytest.raises(RankError, match=r"exit codes \[-9\]"):
        run_ranks(1, publish_and_die, paths["qwen3"], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".writing-v000002"]
    assert list_versions(tmp_path) == []
    prune_versions(tmp_path, keep=1)
    assert list(tmp_path.iterdir()) == []
