"""Writes the quickstart's model: a small random Qwen3 with a tokenizer of single characters; no training happens here.

Written by hand with numpy and safetensors, which takes milliseconds where transformers takes seconds to import.
Parameters: 0.4 million, with 8 experts 0.9 million. Heads and groups divide by 2, for tensor parallelism of 2.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
# Single tokens, so that a tiny model can learn the format; not special, so that decoding shows them.
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CHARACTERS = string.digits + "+-*/()=,>:. " + string.ascii_lowercase + "\n;!?'\"[]"
PAD, BOS, EOS = 0, 1, 2
# One token before and one after the prompt: in a model this small every token costs time and capacity.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
INITIAL_STD = 0.05

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": len(SPECIAL_TOKENS) + len(TAGS) + len(CHARACTERS),
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "initializer_range": INITIAL_STD,
    "dtype": "float32",
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


TOP_K = 2
"""Experts of a token."""


def with_experts(experts: int) -> dict[str, Any]:
    """The same shape as a Qwen3-MoE: in place of each MLP, `experts` that are a third as wide."""
    return CONFIG | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": CONFIG["intermediate_size"] // 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,  # no published one ties them, and SGLang would leave its output layer unset
    }


def write_tiny_model(directory: Path, seed: int, experts: int = 0) -> None:
    """Fill `directory` with config, fp32 weights (normal, std 0.05), tokenizer and chat template; `seed` fixes them.

    With `experts` each layer is a mixture of that many, 2 of them for each token.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", with_experts(experts) if experts else CONFIG)
    ids = {name: CONFIG[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", {**ids, "do_sample": True})
    (directory / "model.safetensors").write_bytes(save(_weights(seed, experts), metadata={"format": "pt"}))
    _tokenizer().save(str(directory / "tokenizer.json"))
    names = ("pad_token", "bos_token", "eos_token", "unk_token")
    tokenizer_config = {
        **dict(zip(names, SPECIAL_TOKENS, strict=True)),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")


def _weights(seed: int, experts: int) -> dict[str, np.ndarray]:
    """All tensors by their Hugging Face name, float32; [output, input] for matrices."""
    hidden, ffn, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        block = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "post_attention_layernorm": (hidden,),
            **_mlp_shapes(hidden, ffn, experts),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    shapes["model.norm.weight"] = (hidden,)
    if experts:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    rng = np.random.default_rng(seed)
    return {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else rng.standard_normal(shape, dtype=np.float32) * np.float32(INITIAL_STD)
        for name, shape in shapes.items()
    }


def _mlp_shapes(hidden: int, ffn: int, experts: int) -> dict[str, tuple[int, ...]]:
    if not experts:
        return {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)}
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate": (experts, hidden)}
    for expert in range(experts):
        one = _mlp_shapes(hidden, ffn // 3, 0)
        shapes |= {name.replace("mlp.", f"mlp.experts.{expert}."): shape for name, shape in one.items()}
    return shapes


def _tokenizer() -> Tokenizer:
    """One token a character. Byte-level BPE without merges, since that is what transformers makes of any Qwen3."""
    pieces = (*SPECIAL_TOKENS, *TAGS, *({" ": "\u0120", "\n": "\u010a"}.get(c, c) for c in CHARACTERS))
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    return tokenizer


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")
