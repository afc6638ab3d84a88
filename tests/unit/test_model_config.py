"""From config.json to Megatron's settings: rotary frequencies, padded vocabulary, refused layouts, the norm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.config import ConfigError, HfConfig, read_hf_config
from megatron_rl.config.model import ModelConfig
from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.policy.layer_spec import exchange_problem
from megatron_rl.policy.model import (
    ModelError,
    attention_scale,
    padded_vocab_size,
    rotary_frequencies,
    transformer_config,
)
from megatron_rl.policy.norm import RMSNorm
from tests.tiny import tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0}


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
YARNS = [YARN, YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 20}, YARN | {"attention_factor": 1.5}]


def hf_of(path: Path, **overrides: Any) -> HfConfig:
    return read_hf_config(tiny_model(path, "llama", **overrides))


@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3, *YARNS, YARN | {"truncate": False}])
def test_rotary_frequencies_equal_transformers(scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf = hf_of(tmp_path, head_dim=64, **({"rope_parameters": scaling} if scaling else {}))
    rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    torch.testing.assert_close(rotary_frequencies(hf), rotary.inv_freq, rtol=1e-6, atol=0)
    scale = attention_scale(hf)
    assert (64**-0.5 if scale is None else scale) == pytest.approx(rotary.attention_scaling**2 * 64**-0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope' is not supported; one of def"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' without original_max_position_embeddings"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported; one of default, linear"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; only silu"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported; only False"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.* not supported; only a list"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding_window=64 is not supported; only null"),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, "sliding_window=4096 is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
    ],
)
def test_a_key_that_would_be_ignored_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tiny_model(tmp_path, "llama") / "config.json"
    described = json.loads(file.read_text())
    for key in ("rope_parameters", "rope_scaling"):
        if key in changes:
            described.pop("rope_parameters", None)
    file.write_text(json.dumps({**described, **changes}))
    with pytest.raises(ConfigError, match=message) as caught:
        read_hf_config(tmp_path)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(("vocab", "tp", "padded"), [(320, 1, 384), (320, 2, 512), (256, 2, 256), (257, 2, 512)])
def test_vocabulary_is_padded_to_the_multiple(vocab: int, tp: int, padded: int) -> None:
    model = ModelConfig(path="x", make_vocab_size_divisible_by=128)
    assert padded_vocab_size(vocab, model, ParallelConfig(tensor_model_parallel_size=tp)) == padded


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tensor_model_parallel_size": 3}, "num_attention_heads=4"),
        ({"pipeline_model_parallel_size": 4}, "pipeline_model_parallel_size=4 does not divide 2 layers"),
    ],
)
def test_layout_that_does_not_fit_the_model_is_refused(parallel: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        transformer_config(hf_of(tmp_path), ModelConfig(path="x"), ParallelConfig(**parallel))


def test_an_exchange_that_transformer_engine_does_not_have_yet_is_refused() -> None:
    assert exchange_problem("p2p", (2, 9, 0), latent=True) is None
    assert exchange_problem("p2p", (2, 4), latent=False) is None
    assert exchange_problem("a2a", (2, 11, 0), latent=False) is None
    for exchange, latent, since in (
        ("p2p", True, "2.6"),
        ("all_gather", False, "2.18"),
        ("a2a", False, "2.11"),
        ("a2a", True, "2.16"),
    ):
        problem = exchange_problem(exchange, (2, 4), latent)
        assert problem
        assert f"context_parallel_exchange={exchange}" in problem
        assert f"from {since} on, and 2.4 is installed" in problem
        assert problem.endswith("use p2p") == (exchange != "p2p")


def test_more_ranks_than_query_groups_must_share_them_evenly(tmp_path: Path) -> None:
    shape = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 24}
    hf = hf_of(tmp_path, hidden_size=96, intermediate_size=144, **shape)
    for ranks in (2, 4, 12):
        transformer_config(hf, ModelConfig(path="x"), ParallelConfig(tensor_model_parallel_size=ranks))
    with pytest.raises(ModelError, match="num_key_value_heads=4"):
        transformer_config(hf, ModelConfig(path="x"), ParallelConfig(tensor_model_parallel_size=6))
    hf = replace(hf, num_attention_heads=3, num_query_groups=1, head_dim=2)
    with pytest.raises(ModelError, match=r"\(num_attention_heads \+ 2 num_key_value_heads\) \* head_dim=10"):
        transformer_config(hf, ModelConfig(path="x"), ParallelConfig(tensor_model_parallel_size=3))


def test_megatron_does_not_rescale_the_loss(tmp_path: Path) -> None:
    config = transformer_config(hf_of(tmp_path), ModelConfig(path="x", dtype="bfloat16"), ParallelConfig())
    assert config.calculate_per_token_loss
    assert config.params_dtype is config.pipeline_dtype is torch.bfloat16


def test_interleaved_stages_send_separately_and_keep_what_is_being_sent(tmp_path: Path) -> None:
    """Megatron's defaults give wrong numbers without an error: at PP 2 always, over gloo depending on timing."""
    parallel_cfg = ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    config = transformer_config(hf_of(tmp_path, layers=4), ModelConfig(path="x"), parallel_cfg)
    assert config.overlap_p2p_comm
    assert not config.batch_p2p_comm
    assert config.deallocate_pipeline_outputs == torch.cuda.is_available()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_torch_in_value_and_gradient(dtype: torch.dtype) -> None:
    norm = RMSNorm(SimpleNamespace(params_dtype=dtype, sequence_parallel=False), 48, eps=1e-3)
    weight = torch.randn(48).to(dtype)
    norm.weight.data.copy_(weight)
    weight.requires_grad_()
    x = torch.randn(5, 3, 48).to(dtype).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    upstream = torch.randn(5, 3, 48).to(dtype)
    got, expected = norm(x), F.rms_norm(twin, (48,), weight, 1e-3)
    got.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(x.grad, twin.grad)
    torch.testing.assert_close(norm.weight.grad, weight.grad)
