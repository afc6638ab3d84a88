"""Builds tiny, random, but complete Hugging Face model directories for tests; holds no tests and no product code.

A directory written by `tiny_model` is a real checkpoint: `config.json`, `model.safetensors`, `tokenizer.json` with a
chat template, `generation_config.json`. Norm weights and biases are moved off their initial ones and zeros, so that a
test which forgets to load one of them fails.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

Family = Literal["qwen3", "qwen2", "llama", "mistral", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe"]

_SHARED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = _SHARED | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
MOE_SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": None},
    "deepseek_v2": _LATENT | {"q_lora_rank": None, "routed_scaling_factor": 1.5, "topk_method": "greedy"},
    "deepseek_v3": _LATENT | {"q_lora_rank": 32, "n_group": 2, "topk_group": 1},
    "glm4_moe": _SHARED
    | {
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
        "use_qk_norm": True,
    },
}
"""Families with experts; what makes their tiny models: eight experts of which a token gets two."""
PAD, IM_START, IM_END, UNK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>"
SPECIAL_TOKENS = (PAD, IM_START, IM_END, UNK)
# Most useful characters first: a vocabulary of 50 keeps digits, tags, lower-case letters, space and newline.
CHARACTERS = (
    string.digits + " \n<>/=" + string.ascii_lowercase + "+-*().,:?_!'\"[]{}@#$%&;|^~`\\" + string.ascii_uppercase
)
BYTE_LEVEL_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """One token per byte: all 256 bytes from 260 entries on, else the first characters of `CHARACTERS` only.

    Ids 0..3 are `SPECIAL_TOKENS`; end of sequence is `<|im_end|>` (id 2), padding `<|endoftext|>` (id 0). Byte-level
    BPE without merges is also what AutoTokenizer rebuilds for Qwen2, whatever the tokenizer.json says.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if vocab_size <= len(SPECIAL_TOKENS):
        raise ValueError(f"vocab_size={vocab_size}: at least {len(SPECIAL_TOKENS) + 1} entries are needed")
    if vocab_size >= BYTE_LEVEL_VOCAB_SIZE:
        pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        pieces = [_byte_symbol(character) for character in CHARACTERS]
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *pieces)) if index < vocab_size}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=PAD,
        unk_token=UNK,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _byte_symbol(character: str) -> str:
    """How byte-level BPE spells an ASCII character in its vocabulary (space and newline are not spelled as such)."""
    return {" ": "\u0120", "\n": "\u010a"}.get(character, character)


def _classes(family: Family) -> tuple[type, type]:
    import transformers

    name = {
        "qwen3_moe": "Qwen3Moe",
        "deepseek_v2": "DeepseekV2",
        "deepseek_v3": "DeepseekV3",
        "glm4_moe": "Glm4Moe",
    }.get(family, family.capitalize())
    return getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")


def tiny_model(
    path: str | Path,
    family: Family = "qwen3",
    tied: bool = False,
    vocab_size: int = 320,
    layers: int = 2,
    seed: int = 0,
    dtype: str | torch.dtype = "float32",
    **overrides: Any,
) -> Path:
    """Write a tiny model and its tokenizer to `path` (created if missing) and return the path.

    Defaults: hidden size 64, 4 heads, 2 key/value heads, head dimension 16, feed-forward 128, context 512 and weights
    of standard deviation 0.1, so that next-token distributions are far from uniform. `overrides` go to the
    transformers config (`hidden_size=128`, `max_position_embeddings=2048`, `initializer_range=0.02`, ...).
    The same arguments give the same weights.
    """
    import torch

    config_class, model_class = _classes(family)
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.1,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index(IM_END),
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
    }
    if family in ("qwen2", "deepseek_v2", "deepseek_v3"):
        del settings["head_dim"]  # it follows from other settings
    if family == "mistral":
        settings["sliding_window"] = None  # its default is a window of 4096
    settings.update(MOE_SETTINGS.get(family, {}))
    settings.update(overrides)
    torch_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    # A fork of the generator: building a model must not move the caller's random state.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**settings)).float()
        with torch.no_grad():
            for name, parameter in (*model.named_parameters(), *model.named_buffers()):
                if "norm" in name or name.endswith("bias"):
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(torch_dtype).save_pretrained(path)
    tiny_tokenizer(vocab_size).save_pretrained(path)
    return Path(path)


def tiny_models(folder: Path, models: Mapping[str, Mapping[str, Any]], **common: Any) -> dict[str, Path]:
    """Write several, each with its own settings of `tiny_model` and those in common, to folders of their names."""
    return {name: tiny_model(folder / name, **{**common, **settings}) for name, settings in models.items()}
