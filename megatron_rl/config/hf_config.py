"""Facts about a Hugging Face model, read from its config.json as plain JSON (no transformers import, milliseconds).

Only reading; what Megatron-Core makes of the facts is in `policy/model.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_rl.files import json_object

from .base import ConfigError
from .hf_experts import MlaShape, MoeShape, mla_of, moe_of
from .hf_numbers import Unsupported, rope_of, values_of

SUPPORTED_MODEL_TYPES = (
    "qwen2",
    "qwen3",
    "llama",
    "mistral",
    "qwen3_moe",
    "mixtral",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
)
EMBEDDED_MODEL_TYPES = ("qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe")
"""Those of them that the embedded engine serves."""
_MEGATRON_FILES = ("latest_checkpointed_iteration.txt", ".metadata")
"""One of them is in a directory with a checkpoint of Megatron's."""
_SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "qkv_bias",
    "qk_norm",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rotary_percent",
)


@dataclass(frozen=True)
class HfConfig:
    """A decoder's shape, in Megatron-Core's words. `head_dim`, `ffn_hidden_size` etc. are counts of features.

    `rotary_percent` is the share, up to 1, of a head's features that are rotated: the first ones.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    moe: MoeShape | None = None
    mla: MlaShape | None = None
    rotary_percent: float = 1.0
    num_predicted_layers: int = 0
    """Layers behind the last that predict tokens further on: checkpoints may hold them; they are not built."""

    @property
    def shape(self) -> dict[str, Any]:
        """What weights there are, of which size, and what is computed with them: models that differ swap none."""
        parts = {name: asdict(part) for name, part in (("moe", self.moe), ("mla", self.mla)) if part is not None}
        return {name: getattr(self, name) for name in _SHAPE} | json.loads(json.dumps(parts))

    @cached_property  # asked for once a layer
    def moe_layers(self) -> tuple[int, ...]:
        """Layers, from 0, whose MLP is a mixture of experts."""
        return () if self.moe is None else tuple(sorted({*range(self.num_layers)}.difference(self.moe.dense_layers)))

    @property
    def rotary_dim(self) -> int:
        """Features of a head's query and key that are rotated."""
        return int(self.head_dim * self.rotary_percent) if self.mla is None else self.mla.qk_rope_head_dim

    @property
    def has_query_latent(self) -> bool:
        """Whether queries are made from a latent of their own."""
        return self.mla is not None and self.mla.q_lora_rank is not None

    @property
    def has_direct_queries(self) -> bool:
        """Whether they are projected from the hidden states, apart from keys and values."""
        return self.mla is not None and self.mla.q_lora_rank is None

    @property
    def has_shared_experts(self) -> bool:
        """Whether its expert layers have experts that see every token."""
        return self.moe is not None and self.moe.shared_ffn_hidden_size > 0

    @property
    def qkv_rows(self) -> int:
        """Features of queries, keys and values together."""
        return self.head_dim * (self.num_attention_heads + 2 * self.num_query_groups)


def changed_shape(recorded: Mapping[str, Any], shape: Mapping[str, Any]) -> list[str]:
    """What `shape` has other than the `HfConfig.shape` that was recorded "there", each with both values."""
    return [
        f"{name} {value} there, {shape.get(name)} here" for name, value in recorded.items() if value != shape.get(name)
    ]


def read_hf_config(path: str | Path) -> HfConfig:
    """Read `path`/config.json.

    Raises:
        ConfigError: no such directory or file, not JSON, an unsupported model_type, a missing key, or a key that asks
            for something that is not computed here.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        is_megatron = any((Path(path) / name).is_file() for name in _MEGATRON_FILES)
        raise ConfigError(
            f"model.path={str(path)!r}: no config.json there; "
            + (
                f"it is a Megatron checkpoint: run `megatron-rl convert megatron-to-hf {path} OUT` and give OUT"
                if is_megatron
                else "give a Hugging Face directory; for a plan (--dry-run) this file alone will do"
            )
        )
    try:
        raw = json_object(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON ({error}); copy the file from the model again") from error
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(
            f"{file}: model_type={model_type!r} is not supported; one of {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    try:
        return _from_raw(raw)
    except KeyError as error:
        raise ConfigError(f"{file}: the key {error} is missing; copy the file from the model again") from error
    except Unsupported as error:
        raise ConfigError(
            f"{file}: {error}: this would be another model than the one described; use another model"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file}: {error}; copy the file from the model again") from error


def _from_raw(raw: dict[str, Any]) -> HfConfig:
    model_type, values = raw["model_type"], values_of(raw)
    heads, hidden, longest = (values[k] for k in ("num_attention_heads", "hidden_size", "max_position_embeddings"))
    window = values.get("sliding_window")
    if window is not None and window < longest:
        raise Unsupported(
            f"sliding_window={window} is not supported; only null, or all of max_position_embeddings={longest}"
        )
    types = values.get("layer_types")
    if types is not None and len(types) != values["num_hidden_layers"]:
        raise ValueError(f"layer_types names {len(types)} layers, and num_hidden_layers={values['num_hidden_layers']}")
    mla, groups = mla_of(model_type, values), values["num_key_value_heads"] or heads
    if heads % groups:
        raise ValueError(f"num_attention_heads={heads} is no multiple of num_key_value_heads={groups}")
    theta, scaling, percent = rope_of(raw, values)
    found = HfConfig(
        model_type=model_type,
        num_layers=values["num_hidden_layers"],
        hidden_size=hidden,
        ffn_hidden_size=values["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=mla.qk_head_dim if mla else values["head_dim"] or _head_dim(hidden, heads),
        vocab_size=values["vocab_size"],
        max_position_embeddings=longest,
        rms_norm_eps=float(values["rms_norm_eps"]),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=values["tie_word_embeddings"],
        qkv_bias=model_type == "qwen2" or values.get("attention_bias", False),
        qk_norm=values.get("use_qk_norm", model_type in ("qwen3", "qwen3_moe")),
        moe=moe_of(model_type, values),
        mla=mla,
        rotary_percent=percent,
        num_predicted_layers=values.get("num_nextn_predict_layers") or 0,
    )
    if found.rotary_dim < 2 or found.rotary_dim % 2:
        raise ValueError(
            f"partial_rotary_factor={percent} of head_dim={found.head_dim} gives no even number of features to rotate"
        )
    return found


def _head_dim(hidden: int, heads: int) -> int:
    if hidden % (2 * heads):
        raise ValueError(
            f"hidden_size={hidden} of num_attention_heads={heads} gives no whole, even head_dim; head_dim is not given"
        )
    return hidden // heads
