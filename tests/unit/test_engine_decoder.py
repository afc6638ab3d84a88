"""Prefill and decoding hold to transformers' full forward pass, for all families and formats that are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.engines.embedded.decoder import Decoder, _parts
from megatron_rl.engines.embedded.fixed_shapes import FixedShapeDecoder
from megatron_rl.engines.embedded.forward import ForwardPass
from tests.tiny import tiny_model

VOCAB = 97
PLENTY = 2**30


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length)


def full_logits(model: Any, tokens: np.ndarray) -> torch.Tensor:
    return model(torch.from_numpy(tokens)[None]).logits[0]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tiny_model(tmp_path_factory.mktemp("qwen3"), vocab_size=VOCAB))


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


FAMILIES: list[dict[str, Any]] = [
    {"family": "qwen3"},
    {"family": "qwen3", "tied": True, "head_dim": 32},
    {"family": "qwen3", "num_key_value_heads": 1},
    {"family": "qwen2"},
    {"family": "llama"},
    {"family": "mistral"},
    {"family": "qwen3_moe"},
    {"family": "qwen3_moe", "norm_topk_prob": False, "mlp_only_layers": [0]},
    {"family": "mixtral"},
    {"family": "deepseek_v3"},
    {
        "family": "deepseek_v3",
        "q_lora_rank": None,
        "rope_interleave": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
    },
    {"family": "glm4_moe"},
    {"family": "glm4_moe", "attention_bias": False, "use_qk_norm": False, "partial_rotary_factor": 0.25},
    {"family": "llama", "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8},
    {
        "family": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
]


@pytest.mark.parametrize("kind", [Decoder, FixedShapeDecoder])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_prefill_and_steps_equal_the_full_forward(tmp_path: Path, family: dict[str, Any], kind: type[Decoder]) -> None:
    model = load(tiny_model(tmp_path, vocab_size=VOCAB, **family))
    decoder = kind(ForwardPass(model), 16, 96, PLENTY)
    sequences = [prompt(n, n) for n in (1, 5, 16, 17, 40)]
    logits = decoder.prefill(sequences, [[i] for i in range(5)], 0)
    for step in range(20):
        for sequence, row in zip(sequences, logits, strict=True):
            torch.testing.assert_close(row, full_logits(model, sequence)[-1], rtol=0, atol=2e-5)
        new = prompt(5, 100 + step)
        logits = decoder.decode(new, np.array([len(s) for s in sequences]))
        sequences = [np.append(s, token) for s, token in zip(sequences, new, strict=True)]


def test_few_long_sequences_among_short_ones_attend_by_themselves_and_to_everything(
    qwen3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_rl.engines.embedded.decoder.SPLIT_COST", 0)
    decoder = Decoder(ForwardPass(qwen3), 16, 96, PLENTY)
    sequences = [prompt(n, n) for n in (5, 80, 7, 6, 33, 9, 70, 3, 4, 8, 2, 11, 12)]
    decoder.prefill(sequences, [[i] for i in range(len(sequences))], 0)
    reach = decoder._reach(np.array([len(s) for s in sequences]), 81)
    assert reach.far is not None
    assert (reach.near, reach.far.tolist()) == (16, [1, 4, 6])
    for step in range(3):
        new = prompt(len(sequences), 200 + step)
        logits = decoder.decode(new, np.array([len(s) for s in sequences]))
        sequences = [np.append(s, token) for s, token in zip(sequences, new, strict=True)]
        for sequence, row in zip(sequences, logits, strict=True):
            torch.testing.assert_close(row, full_logits(qwen3, sequence)[-1], rtol=0, atol=2e-5)


def test_bfloat16_stays_near_the_full_forward_in_bfloat16(tmp_path: Path) -> None:
    model = load(tiny_model(tmp_path, vocab_size=VOCAB), torch.bfloat16)
    decoder = Decoder(ForwardPass(model), 4, 64, PLENTY)
    tokens = prompt(20)
    decoder.prefill([tokens[:-1]], [[0]], 0)
    logits = decoder.decode(tokens[-1:], np.array([19]))
    assert logits.dtype == torch.bfloat16
    expected = full_logits(model, tokens)[-1]
    assert (logits[0] - expected).abs().max() < 0.03 * expected.abs().max()


def test_copies_of_a_prompt_go_separate_ways(qwen3: Any) -> None:
    decoder = Decoder(ForwardPass(qwen3), 8, 64, PLENTY)
    shared, other = prompt(9), prompt(4, 1)
    logits = decoder.prefill([shared, other], [[0, 2, 3], [1]], 0)
    assert logits.shape == (2, VOCAB)
    new = np.array([11, 12, 13, 14])
    logits = decoder.decode(new, np.array([9, 4, 9, 9]))
    for row, (start, token) in enumerate(zip((shared, other, shared, shared), new, strict=True)):
        expected = full_logits(qwen3, np.append(start, token))[-1]
        torch.testing.assert_close(logits[row], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", [Decoder, FixedShapeDecoder])
def test_joining_growing_and_moving_keep_what_is_cached(qwen3: Any, kind: type[Decoder]) -> None:
    decoder = kind(ForwardPass(qwen3), 48, 300, PLENTY)
    first = prompt(3)
    decoder.prefill([first], [[0]], 0)
    longs = [prompt(120 + i, i) for i in range(30)]  # more slots and a longer cache than before
    decoder.prefill(longs, [[1 + i] for i in range(30)], 1)
    decoder.move(np.array([1, 2]), np.array([29, 30]), 150)  # slots 1 and 2 are given up, the last two take their place
    live = [first, longs[28], longs[29], *longs[2:28]]
    new = prompt(len(live), 7)
    logits = decoder.decode(new, np.array([len(s) for s in live]))
    for row in (0, 1, 2, 3, 28):
        expected = full_logits(qwen3, np.append(live[row], new[row]))[-1]
        torch.testing.assert_close(logits[row], expected, rtol=0, atol=2e-5)


def test_prompts_beyond_one_pass_are_split_and_put_together_in_order(
    qwen3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_rl.engines.embedded.decoder.PREFILL_TOKENS", 64)
    decoder = Decoder(ForwardPass(qwen3), 16, 128, PLENTY)
    prompts = [prompt(n, n) for n in (50, 3, 100, 30, 31, 4)]
    logits = decoder.prefill(prompts, [[i] for i in range(6)], 0)
    for tokens, row in zip(prompts, logits, strict=True):
        torch.testing.assert_close(row, full_logits(qwen3, tokens)[-1], rtol=0, atol=2e-5)


def test_long_prompts_get_a_pass_of_their_own_where_padding_the_others_would_cost_more() -> None:
    prompts = [prompt(n) for n in (20, 16, 400, 18, 390)]
    assert list(_parts(prompts)) == [[1, 3, 0], [4, 2]]
    assert list(_parts([prompt(n) for n in (100, 150, 200)])) == [[0, 1, 2]]


def test_prompt_log_probs_equal_the_full_forward_across_pieces(qwen3: Any) -> None:
    decoder = Decoder(ForwardPass(qwen3), 2, 2048, PLENTY)
    tokens = prompt(1200)
    expected = torch.log_softmax(full_logits(qwen3, tokens), -1)[torch.arange(1199), torch.from_numpy(tokens[1:])]
    np.testing.assert_allclose(decoder.prompt_log_probs(tokens), expected.numpy(), rtol=0, atol=2e-5)
    assert decoder.prompt_log_probs(tokens[:1]).shape == (0,)


def test_fixed_shapes_give_a_sequence_the_same_bits_in_any_company(qwen3: Any) -> None:
    decoder = FixedShapeDecoder(ForwardPass(qwen3), 20, 64, PLENTY)
    sequence = prompt(21)

    def run(slot: int, company: int) -> torch.Tensor:
        decoder.flush()
        prompts = [sequence if i == slot else prompt(1 + i * 2, i) for i in range(company)]
        rows = [decoder.prefill(prompts, [[i] for i in range(company)], 0)[slot]]
        lengths = np.array([len(p) for p in prompts])
        for step in range(6):
            rows.append(decoder.decode(np.full(company, 5 + step), lengths + step)[slot])
        return torch.stack(rows)

    alone = run(0, 1)
    for slot, company in ((0, 2), (6, 7), (17, 20), (0, 20), (15, 16)):
        assert torch.equal(run(slot, company), alone), f"slot {slot} of {company}"


def test_fixed_shapes_that_do_not_fit_are_refused_with_the_keys_to_change(qwen3: Any) -> None:
    with pytest.raises(ValueError, match=r"lower max_running_requests or context_length"):
        FixedShapeDecoder(ForwardPass(qwen3), 4096, 512, 2**20)


@pytest.mark.parametrize("kind", [Decoder, FixedShapeDecoder])
def test_wiped_slots_do_not_spread_nan(qwen3: Any, kind: type[Decoder]) -> None:
    decoder = kind(ForwardPass(qwen3), 2, 64, PLENTY)
    weight = qwen3.model.layers[0].input_layernorm.weight
    healthy = weight.clone()
    weight.fill_(float("nan"))
    assert decoder.prefill([prompt(30), prompt(30, 1)], [[0], [1]], 0).isnan().all()
    weight.copy_(healthy)
    decoder.wipe(np.array([0, 1]))
    short = prompt(4)
    decoder.prefill([short, short[:2]], [[0], [1]], 0)  # shorter: what lies behind is masked, not overwritten
    logits = decoder.decode(np.array([1, 2]), np.array([4, 2]))
    for row, tokens in enumerate((np.append(short, 1), np.append(short[:2], 2))):
        torch.testing.assert_close(logits[row], full_logits(qwen3, tokens)[-1], rtol=0, atol=2e-5)


def test_models_that_cannot_be_driven_are_refused(qwen3: Any) -> None:
    class Other:
        class config:
            model_type = "gpt2"

    with pytest.raises(ValueError, match="gpt2"):
        ForwardPass(Other())  # type: ignore[arg-type]
