"""Megatron itself reads what the converter writes, in other layouts, optimizer state included; `verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.weights.convert import actions
from megatron_rl.weights.convert.compare import compare
from megatron_rl.weights.convert.cuts import TargetLayout
from megatron_rl.weights.convert.opened import open_checkpoint
from tests.convert_models import convert, silent
from tests.parallel.dense_models import LAYOUTS, MODELS, VOCAB_SIZE
from tests.parallel.launch import run_ranks
from tests.parallel.policy_setup import layout, local_part, make_batch, make_config
from tests.tiny import tiny_models

pytestmark = pytest.mark.parallel
TRAINED = Path("run", "checkpoints", "step-000001")
READ_IN = ("tp1", "tp4", "tp2-pp2-vpp2")
STOCK = "Megatron-Core's own model"
TRAINED_IN = "tp2-pp2"
"""Whose checkpoint is converted, cast and resharded."""


# ------------------------------------------------------------------------------------------------------- on the ranks


def load_converted(paths: dict[str, Path], folder: Path) -> dict[tuple[str, str], list[str]]:
    """(model, layout) -> names of exported tensors that are not the source's, bit for bit."""
    from megatron_rl.policy import distributed

    found = {}
    for name in READ_IN:
        with layout(make_config("unused", LAYOUTS[name])):
            for model, path in paths.items():
                found[model, name] = load_into_our_model(path, folder / model, LAYOUTS[name])
    with layout(make_config("unused", LAYOUTS["tp2-pp2"])):
        for model, path in paths.items():
            found[model, STOCK] = load_into_stock_megatron(path, folder / model, LAYOUTS["tp2-pp2"])
    train_and_save(paths["qwen3-tied"], folder / "run", LAYOUTS[TRAINED_IN])
    distributed.shutdown()
    return found


def load_into_our_model(path: Path, converted: Path, parallel: dict[str, Any]) -> list[str]:
    """Wrong tensors after this project's model has loaded the checkpoint."""
    from megatron_rl.policy.model import build_model
    from megatron_rl.policy.sharded_state import load_weights
    from megatron_rl.weights.convert.torch_dist import find_torch_dist
    from megatron_rl.weights.export import export_hf_weights

    cfg, hf = make_config(path, parallel), open_checkpoint(path).hf()
    chunks = build_model(hf, cfg.model, cfg.parallel)
    where = find_torch_dist(converted)
    assert where is not None
    load_weights(where, chunks)
    source = load_file(path / "model.safetensors")
    exported = dict(export_hf_weights(chunks, hf))
    wrong = [name for name, tensor in exported.items() if not torch.equal(tensor, source[name])]
    return [*wrong, *(["nothing exported"] if not exported else [])]


def load_into_stock_megatron(path: Path, converted: Path, parallel: dict[str, Any]) -> list[str]:
    """Wrong tensors after Megatron-Core's own GPTModel, of its own local spec, has loaded the checkpoint by itself."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_rl.policy.model import padded_vocab_size, transformer_config
    from megatron_rl.weights.convert.torch_dist import find_torch_dist
    from megatron_rl.weights.export import export_hf_weights

    cfg = make_config(path, parallel)
    hf = open_checkpoint(path).hf()
    config = transformer_config(hf, cfg.model, cfg.parallel)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        if issubclass(layer.submodules.mlp.module, MoELayer):
            # As Transformer Engine's spec stores it; the local one names it as if it were fused with the experts.
            layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    model = GPTModel(
        config,
        spec,
        vocab_size=padded_vocab_size(hf.vocab_size, cfg.model, cfg.parallel),
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
    )
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(find_torch_dist(converted)))
    assert (loaded["checkpoint_version"], loaded["args"].num_layers) == (3.0, hf.num_layers)
    model.load_state_dict(loaded["model"])
    source = load_file(path / "model.safetensors")
    return [name for name, tensor in export_hf_weights([model], hf) if not torch.equal(tensor, source[name])]


def train_and_save(path: Path, run_dir: Path, options: dict[str, Any]) -> None:
    """One update in a layout, so that the optimizer has a state; then its checkpoint."""
    from megatron_rl.policy.policy import Policy

    cfg = make_config(path, options, dtype="bfloat16")
    with layout(cfg) as dp_rank:
        policy = Policy.build(cfg)
        policy.sft_step(*local_part(make_batch(VOCAB_SIZE), cfg, dp_rank), 1e-2)
        policy.save(run_dir, 1, {}, None)


def load_resharded(path: Path, source: Path, out: Path) -> None:
    """Read a training state in yet another layout and write it again."""
    import torch.distributed as dist

    from megatron_rl.policy import distributed
    from megatron_rl.policy.policy import Policy
    from megatron_rl.policy.sharded_state import load_training_state, save_training_state

    cfg = make_config(path, {"pipeline_model_parallel_size": 2}, dtype="bfloat16")
    with layout(cfg):
        policy = Policy.build(cfg)
        load_training_state(source, policy.chunks, policy.optimizer, None)
        if dist.get_rank() == 0:
            out.mkdir()
        dist.barrier()
        save_training_state(out, policy.chunks, policy.optimizer, None)
    distributed.shutdown()


def verify_two(good: Path, bad: Path, reference: Path) -> list[Any]:
    from megatron_rl.verify import SENTENCES, verify_log_probs

    return [verify_log_probs(path, reference, SENTENCES[:3], 1e-5) for path in (good, bad)]


# ---------------------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tiny_models(tmp_path_factory.mktemp("models"), MODELS, layers=4, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def folder(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted checkpoint of every model; after `loaded`, also the run's."""
    folder = tmp_path_factory.mktemp("converted")
    for number, (name, path) in enumerate(paths.items()):
        cut = (TargetLayout(2, 2), TargetLayout(1, 1, 1), TargetLayout(4, 1))[number % 3]
        convert(actions.hf_to_megatron(open_checkpoint(path), folder / name, cut, None))
    return folder


@pytest.fixture(scope="module")
def loaded(paths: dict[str, Path], folder: Path) -> list[dict[tuple[str, str], list[str]]]:
    return run_ranks(4, load_converted, paths, folder, timeout=240)


# ---------------------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("name", [*READ_IN, STOCK])
@pytest.mark.parametrize("model", MODELS)
def test_megatron_loads_a_converted_checkpoint_in_any_layout(
    model: str, name: str, loaded: list[dict[tuple[str, str], list[str]]]
) -> None:
    assert [rank[model, name] for rank in loaded] == [[]] * 4


def test_weights_of_a_training_checkpoint_become_a_hugging_face_directory(
    loaded: object, paths: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    source = open_checkpoint(folder / TRAINED, paths["qwen3-tied"])
    convert(actions.megatron_to_hf(source, tmp_path / "hf", None))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").dtype is torch.bfloat16
    found = compare(source, open_checkpoint(tmp_path / "hf"), silent)
    assert found.is_equal
    moved = compare(open_checkpoint(paths["qwen3-tied"]), open_checkpoint(tmp_path / "hf"), silent)
    assert not moved.is_equal  # it was trained


def test_a_resharded_checkpoint_holds_all_of_the_training_state(
    loaded: object, paths: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    for out, cut in ((tmp_path / "one", TargetLayout(1, 1)), (tmp_path / "two", TargetLayout(4, 2))):
        out.mkdir()
        convert(actions.reshard(open_checkpoint(folder / TRAINED), out / "policy", cut))
        assert compare(open_checkpoint(folder / TRAINED), open_checkpoint(out), silent).is_equal
    run_ranks(2, load_resharded, paths["qwen3-tied"], tmp_path / "two", tmp_path / "again", timeout=120)
    found = compare(open_checkpoint(tmp_path / "again"), open_checkpoint(folder / TRAINED), silent)
    # The padded vocabulary of TP 1 is smaller than that of TP 2; all else is equal to the last bit.
    differing = {row.name for row in found.differences if row.max_abs}
    assert all("embedding.word_embeddings.weight" in name for name in differing)
    assert sum("optimizer.state.exp_avg_sq" in row.name for row in found.differences) > 10
    assert not found.only_first
    assert not found.only_second


def test_verify_names_the_first_layer_that_deviates(
    loaded: object, paths: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    from megatron_rl.weights.companions import copy_companions

    tensors = load_file(paths["llama"] / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3] += 0.3
    copy_companions(paths["llama"], tmp_path / "bad")
    save_file(tensors, tmp_path / "bad" / "model.safetensors", metadata={"format": "pt"})
    good, bad = run_ranks(1, verify_two, folder / "llama", tmp_path / "bad", paths["llama"], timeout=120)[0]
    assert good.is_equal
    assert good.first_deviation is None
    assert good.tokens > 100
    assert not bad.is_equal
    assert bad.first_deviation.startswith("model.layers.2.mlp ")
