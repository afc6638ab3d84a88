"""Keys of a config.json: what each may hold, and what it is where it is absent; what they mean is in `hf_config`.

An absent key is what transformers 5 takes for that family; where that is a size of one published model, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_LAYERS = 10_000


class Unsupported(ValueError):
    """A value that is valid and asks for something that is not computed here."""


@dataclass(frozen=True)
class Kind:
    """What a key may hold. `words` complete the sentence "key=value is ..."."""

    words: str
    admits: Callable[[Any], bool]
    error: type[ValueError] = ValueError

    def check(self, key: str, value: Any) -> None:
        """Raises `error`, a ValueError, for a value that is not admitted."""
        if not self.admits(value):
            shown = repr(value)
            raise self.error(f"{key}={shown if len(shown) <= 80 else shown[:77] + '...'} is {self.words}")


def whole(low: int = 1, high: int = 2**31 - 1, step: int = 1) -> Kind:
    """A whole number, and no true or false."""
    even = " that is even" if step == 2 else ""
    sign = "positive whole number" if low == 1 else f"whole number from {low}"
    return Kind(f"not a {sign}{even} up to {high}", lambda v: type(v) is int and low <= v <= high and v % step == 0)


def number(low: float = 0.0, high: float = 1e30) -> Kind:
    """A number, `low` excluded where it is 0; neither infinite nor NaN."""
    sign = f"number from {low:g}" if low else "positive number"
    return Kind(f"not a {sign} up to {high:g}", lambda v: type(v) in (int, float) and v > 0 and low <= v <= high)


def only(*values: Any) -> Kind:
    """One of these; all others are unsupported."""
    words = f"not supported; only {' or '.join('null' if v is None else str(v) for v in values)}"
    return Kind(words, lambda v: any(type(v) is type(w) and v == w for w in values), Unsupported)


def list_of(kind: Kind, words: str) -> Kind:
    """A list of such values."""
    return Kind(words, lambda v: isinstance(v, list) and all(map(kind.admits, v)), kind.error)


def or_null(kind: Kind) -> Kind:
    """The same, or null."""
    return Kind(f"{kind.words}, or null", lambda v: v is None or kind.admits(v), kind.error)


FLAG = Kind("neither true nor false", lambda v: isinstance(v, bool))
OBJECT = Kind("no object", lambda v: isinstance(v, dict))

_EXPERTS, _LAYER, _WIDTH = whole(high=10_000), whole(0, MAX_LAYERS), whole()
_KINDS: dict[str, Kind] = {
    "num_hidden_layers": whole(high=MAX_LAYERS),
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "num_attention_heads": _WIDTH,
    "num_key_value_heads": or_null(_WIDTH),
    "head_dim": or_null(whole(step=2)),
    "vocab_size": _WIDTH,
    "max_position_embeddings": _WIDTH,
    "rms_norm_eps": number(high=1.0),
    "tie_word_embeddings": FLAG,
    "num_nextn_predict_layers": or_null(_LAYER),
    "hidden_act": only("silu"),
    "attention_bias": only(False),
    "mlp_bias": only(False),
    "use_sliding_window": only(False),
    "layer_types": or_null(list_of(only("full_attention"), "not supported; only a list of full_attention")),
    "rope_theta": number(1.001),
    "rope_scaling": or_null(OBJECT),
    "rope_parameters": or_null(OBJECT),
    "partial_rotary_factor": only(1, 1.0),
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "num_experts_per_tok": _EXPERTS,
    "moe_intermediate_size": _WIDTH,
    "norm_topk_prob": FLAG,
    "decoder_sparse_step": _WIDTH,
    "mlp_only_layers": or_null(list_of(_LAYER, "no list of layers, whole numbers from 0")),
}
_SHARED: dict[str, Kind] = {
    "first_k_dense_replace": _LAYER,
    "n_shared_experts": or_null(whole(0, 10_000)),
    "routed_scaling_factor": number(),
}
"""Of models with experts that see every token."""
_LATENT = _SHARED | {
    "q_lora_rank": or_null(_WIDTH),
    "kv_lora_rank": _WIDTH,
    "qk_nope_head_dim": _WIDTH,
    "qk_rope_head_dim": whole(step=2),
    "v_head_dim": _WIDTH,
    "moe_layer_freq": only(1),
    "rope_interleave": only(True),
}
_BIASED_CHOICE: dict[str, Kind] = {
    "scoring_func": only("sigmoid"),
    "topk_method": only("noaux_tc"),
    "n_group": _EXPERTS,
    "topk_group": _EXPERTS,
}
_WINDOW = {"sliding_window": or_null(_WIDTH), "num_key_value_heads": _WIDTH}
_FAMILY_KINDS: dict[str, dict[str, Kind]] = {
    "qwen3": {"head_dim": whole(step=2)},
    "qwen3_moe": {"num_key_value_heads": _WIDTH},
    "mistral": _WINDOW,
    "mixtral": _WINDOW,
    "deepseek_v2": _LATENT
    | {"scoring_func": only("softmax"), "topk_method": only("greedy"), "norm_topk_prob": only(False, None)},
    "deepseek_v3": _LATENT | _BIASED_CHOICE,
    "glm4_moe": _SHARED
    | _BIASED_CHOICE
    | {
        "num_key_value_heads": _WIDTH,
        "n_shared_experts": whole(0, 10_000),
        "attention_bias": FLAG,
        "use_qk_norm": FLAG,
        "partial_rotary_factor": number(high=1.0),
    },
}
_ABSENT: dict[str, Any] = {
    "head_dim": None,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
_LATENT_ABSENT: dict[str, Any] = {"num_key_value_heads": None, "q_lora_rank": 1536}
_FAMILY_ABSENT: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None},
    "qwen3": {"head_dim": 128},
    "mistral": {"sliding_window": 4096},
    "mixtral": {"sliding_window": None, "rope_theta": 1e6},
    "deepseek_v2": _LATENT_ABSENT | {"first_k_dense_replace": 0, "n_shared_experts": 2, "routed_scaling_factor": 1.0},
    "deepseek_v3": _LATENT_ABSENT
    | {
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
    },
}
_ROPE_KINDS: dict[str, Kind] = {
    "rope_type": Kind("no name", lambda v: isinstance(v, str)),
    "type": Kind("no name", lambda v: isinstance(v, str)),
    "rope_theta": _KINDS["rope_theta"],
    "factor": number(1.0, 1e6),
    "low_freq_factor": number(high=1e6),
    "high_freq_factor": number(high=1e6),
    "original_max_position_embeddings": _WIDTH,
    "attention_factor": or_null(number(high=1e6)),
    "beta_fast": or_null(number(high=1e6)),
    "beta_slow": or_null(number(high=1e6)),
    "mscale": or_null(number(high=1e6)),
    "mscale_all_dim": or_null(number(high=1e6)),
    "truncate": FLAG,
}
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Supported types, and what each cannot do without."""


def values_of(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys that are read for this model_type, absent ones with what they stand for; KeyError is left to the reader.

    Raises:
        ValueError: a key holds what it may not hold; Unsupported if it asks for something not computed here.
    """
    family = raw["model_type"]
    kinds = _kinds_of(family)
    values = _ABSENT | _FAMILY_ABSENT.get(family, {}) | {key: value for key, value in raw.items() if key in kinds}
    for key, value in values.items():
        kinds[key].check(key, value)
    return values


def _kinds_of(family: str) -> dict[str, Kind]:
    return _KINDS | _FAMILY_KINDS.get(family, {})


def rope_of(raw: dict[str, Any], values: dict[str, Any]) -> tuple[float, dict[str, Any] | None, float]:
    """What is rotated how, of checked `values`: base of the frequencies, their scaling (None without any), and the
    share of a head's features that are rotated. Raises ValueError.
    """
    places = [values[key] for key in ("rope_scaling", "rope_parameters") if values[key]]
    if len(places) == 2 and places[0] != places[1]:
        raise Unsupported("rope_scaling and rope_parameters that differ are not supported; only one of them")
    rope: dict[str, Any] = places[0] if places else {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_NEEDS:
        raise Unsupported(f"rope type {kind!r:.80} is not supported; one of {', '.join(_ROPE_NEEDS)}")
    if lacking := [key for key in _ROPE_NEEDS[kind] if rope.get(key) is None]:
        raise Unsupported(f"rope type {kind!r} without {', '.join(lacking)} is not supported")
    kinds = _ROPE_KINDS | {"partial_rotary_factor": _kinds_of(raw["model_type"])["partial_rotary_factor"]}
    for key, value in rope.items():
        if key not in kinds:
            raise Unsupported(f"rope key {key!r:.80} is not supported; only {', '.join(kinds)}")
        kinds[key].check(key, value)
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if key in raw and key in rope and raw[key] != rope[key]:
            raise ValueError(
                f"{key}={raw[key]!r:.80} and, within the rope parameters, {rope[key]!r}: only one can hold"
            )
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ValueError(f"low_freq_factor={rope['low_freq_factor']} is not below {rope['high_freq_factor']}")
    percent = float(rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)))
    if kind == "yarn" and percent < 1:
        # YaRN's factor is in the scale of the scores, of which the features that are not rotated have a part.
        raise Unsupported(f"rope type 'yarn' with partial_rotary_factor={percent} is not supported; only with 1")
    return float(rope.get("rope_theta", values["rope_theta"])), rope if kind != "default" else None, percent
