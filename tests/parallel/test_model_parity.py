"""One launch of four ranks builds each family in many layouts; log-probs and gradients must equal transformers'."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.launch import run_ranks, this_rank
from tests.tiny import tiny_model

pytestmark = pytest.mark.parallel

RANKS = 4
VOCAB_SIZE = 320
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3"},
    "qwen3-tied": {"family": "qwen3", "tied": True},
    "qwen2": {"family": "qwen2"},
    "llama": {"family": "llama", "rope_parameters": LLAMA3_ROPE},
    "mistral": {"family": "mistral", "rope_parameters": LINEAR_ROPE},
    "qwen2-yarn": {"family": "qwen2", "rope_parameters": YARN_ROPE, "tied": True},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {"data_parallel_size": 4},
    "tp2": {"tensor_model_parallel_size": 2, "data_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2, "data_parallel_size": 2},
    "tp2-pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "tp2-sp-full": {
        "tensor_model_parallel_size": 2,
        "data_parallel_size": 2,
        "sequence_parallel": True,
        "recompute": "full",
    },
    "tp2-pp2-sp-selective": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
        "recompute": "selective",
    },
    "tp2-pp2-vpp2": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    },
    "tp4": {"tensor_model_parallel_size": 4},
}
# Every family in these layouts (at TP 4 two ranks share a query group); what a layout does beyond them does not depend
# on the family's names. What a rotation does is the same in all layouts.
PLAIN = ("tp1", "tp2", "pp2", "tp2-pp2", "tp4")
ROTATIONS = ("mistral", "qwen2-yarn")
CASES = [
    (model, layout)
    for layout in LAYOUTS
    for model in MODELS
    if (layout in PLAIN and model not in ROTATIONS) or model.startswith("qwen3") or layout == "tp2"
]
# Sequence lengths of each micro-batch: a single token, equal lengths, skewed ones that need buckets, one sequence.
MICROBATCHES = ((5, 1, 14), (9, 9), (3, 60, 2, 7, 4, 4), (12,))


def sequences() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randint(VOCAB_SIZE, (n,), generator=generator) for n in lengths] for lengths in MICROBATCHES]


def loss_weights() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [[torch.randn(n - 1, generator=generator) for n in lengths] for lengths in MICROBATCHES]


# ------------------------------------------------------------------------------------------------------- on the ranks


@dataclass
class Result:
    """What one rank found for one model in one layout."""

    stage: int
    log_probs: dict[int, torch.Tensor] = field(default_factory=dict)
    """Of each micro-batch of this data-parallel rank, on the last stage: [tokens but the sequences' last ones]."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """By Hugging Face name, on data-parallel rank 0."""


def run_cases(paths: dict[str, Path]) -> dict[tuple[str, str], Result]:
    from megatron.core import parallel_state

    from megatron_rl.config.parallel import ParallelConfig
    from megatron_rl.policy import distributed

    results = {}
    for name, layout in LAYOUTS.items():
        parallel_cfg = ParallelConfig(**layout)
        distributed.initialize(this_rank(), parallel_cfg, seed=3, timeout_s=60)
        for model in [model for model, layout_name in CASES if layout_name == name]:
            results[model, name] = run_case(paths[model], parallel_cfg)
        parallel_state.destroy_model_parallel()
    distributed.shutdown()
    return results


def run_case(path: Path, parallel_cfg: Any) -> Result:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_rl.config import read_hf_config
    from megatron_rl.config.model import ModelConfig
    from megatron_rl.policy.model import build_model
    from megatron_rl.weights.export import export_hf_weights
    from megatron_rl.weights.load import load_hf_weights

    hf = read_hf_config(path)
    chunks = build_model(hf, ModelConfig(path=str(path), dtype="float32"), parallel_cfg)
    load_hf_weights(chunks, hf, path)
    config = chunks[0].config
    config.finalize_model_grads_func = lambda models, num_tokens, **kw: finalize_model_grads(models, None, **kw)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    models = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
    result = Result(stage=parallel_state.get_pipeline_model_parallel_rank())
    dp_rank, dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = list(range(len(MICROBATCHES)))[dp_rank::dp_size]
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(mine) for _ in models] if len(models) > 1 else iter(mine),
        model=models if len(models) > 1 else models[0],
        num_microbatches=len(mine),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    result.log_probs = {index: output["log_probs"] for index, output in zip(mine, outputs, strict=False)}
    if dp_rank == 0:
        for model in models:
            for parameter in model.parameters():
                parameter.data = parameter.main_grad
        result.gradients = {name: tensor.clone() for name, tensor in export_hf_weights(models, hf)}
    return result


def forward_step(iterator: Any, model: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_rl.kernels import PolicyLossOutput, linear_policy_loss
    from megatron_rl.weights.mapping import unwrap

    index = next(iterator)
    parts = sequences()[index]
    tokens = torch.cat(parts)
    targets = torch.cat([torch.cat([part[1:], part.new_tensor([-1])]) for part in parts])
    padding = -len(tokens) % 4  # tokens behind the last sequence, as sequence parallelism needs them
    tokens, targets = (
        torch.nn.functional.pad(tokens, (0, padding)),
        torch.nn.functional.pad(targets, (0, padding), value=-1),
    )
    cu_seqlens = torch.tensor([0, *MICROBATCHES[index]]).cumsum(0).int()
    longest = max(MICROBATCHES[index])
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    hidden = model(tokens[None], None, None, packed_seq_params=packed)
    weights = torch.cat(loss_weights()[index])

    def weighted_sum(rows: torch.Tensor, log_probs: torch.Tensor, _: None) -> PolicyLossOutput:
        part = weights[torch.searchsorted((targets >= 0).nonzero()[:, 0], rows)]
        return PolicyLossOutput((log_probs * part).sum().double(), torch.zeros(len(part), dtype=torch.int8), part, None)

    def loss(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        found = linear_policy_loss(
            hidden[0],
            unwrap(model).output_weight,
            targets,
            objective=weighted_sum,
            group=parallel_state.get_tensor_model_parallel_group(),
            vocab_size=VOCAB_SIZE,
            chunk_tokens=16,
            sequence_parallel=unwrap(model).config.sequence_parallel,
        )
        log_probs = found.log_probs[targets >= 0]
        return found.loss, torch.tensor(len(log_probs), dtype=torch.int), {"log_probs": log_probs}

    return hidden, loss


# ---------------------------------------------------------------------------------------------------------- the tests


@dataclass
class Reference:
    log_probs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


def transformers_reference(path: Path) -> Reference:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    log_probs = []
    total = torch.zeros(())
    for parts, weights in zip(sequences(), loss_weights(), strict=True):
        rows = [model(part[None]).logits[0, :-1].log_softmax(-1).gather(1, part[1:, None])[:, 0] for part in parts]
        log_probs.append(torch.cat(rows))
        total = total + (log_probs[-1] * torch.cat(weights)).sum()
    total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Reference([rows.detach() for rows in log_probs], gradients)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: tiny_model(folder / name, layers=4, vocab_size=VOCAB_SIZE, **settings)
        for name, settings in MODELS.items()
    }


@pytest.fixture(scope="module")
def results(paths: dict[str, Path]) -> list[dict[tuple[str, str], Result]]:
    return run_ranks(RANKS, run_cases, paths, timeout=180)


@pytest.fixture(scope="module")
def references(paths: dict[str, Path]) -> dict[str, Reference]:
    return {name: transformers_reference(path) for name, path in paths.items()}


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_log_probs_equal_transformers(model: str, layout: str, results: Any, references: dict[str, Reference]) -> None:
    log_probs: dict[int, torch.Tensor] = {}
    for rank in results:
        log_probs |= rank[model, layout].log_probs
    assert sorted(log_probs) == list(range(len(MICROBATCHES)))
    for index, expected in enumerate(references[model].log_probs):
        torch.testing.assert_close(log_probs[index], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_gradients_equal_transformers(model: str, layout: str, results: Any, references: dict[str, Reference]) -> None:
    gradients: dict[str, torch.Tensor] = {}
    for rank in results:
        gradients |= rank[model, layout].gradients
    expected = references[model].gradients
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert difference <= 1e-5, f"{name}: {difference:.2e}"
