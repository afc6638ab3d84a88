"""Keys of a config.json: absent ones are what transformers takes, impossible values are refused in one message."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import ConfigError, HfConfig, read_hf_config
from megatron_rl.config.hf_config import SUPPORTED_MODEL_TYPES

LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "n_shared_experts": 3,
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 1.7,
    "q_lora_rank": 48,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "norm_topk_prob": False,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "moe_layer_freq": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": False, "sliding_window": 4096},
    "qwen3": {"use_sliding_window": False, "layer_types": ["full_attention"] * 6},
    "llama": {"mlp_bias": False},
    "mistral": {"sliding_window": None},
    "qwen3_moe": {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "mixtral": {"num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": None},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT
    | {
        "n_group": 16,
        "topk_group": 4,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_interleave": True,
        "num_nextn_predict_layers": 1,
    },
    "glm4_moe": {
        "head_dim": 16,
        "partial_rotary_factor": 0.25,
        "attention_bias": True,
        "use_qk_norm": True,
        "moe_intermediate_size": 32,
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
        "n_shared_experts": 3,
        "first_k_dense_replace": 2,
        "routed_scaling_factor": 1.7,
        "n_group": 16,
        "topk_group": 4,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
}
COMMON: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-3,
    "rope_theta": 5e5,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
}
FULL = {family: COMMON | keys | {"model_type": family} for family, keys in FAMILIES.items()}
CASES = [(family, key) for family in FULL for key in FULL[family]]
NUMBERS = [
    float("nan"),
    float("inf"),
    -float("inf"),
    -1,
    -0.5,
    0,
    1,
    1.5,
    3,
    "8",
    {},
    {"a": 1},
    [-1],
    [99],
    [True],
    None,
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([10**12, 10**400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "factor", "x"]), inner),
    max_leaves=5,
)
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "truncate": True,
        "attention_factor": 1.5,
    },
}


def read(described: dict[str, Any]) -> HfConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(described))
        return read_hf_config(folder)


def outcome(described: dict[str, Any]) -> HfConfig | str:
    """The facts, or why there are none; any other error is the test's."""
    try:
        return read(described)
    except ConfigError as error:
        return str(error)


def test_every_supported_family_is_tried() -> None:
    assert set(FULL) == set(SUPPORTED_MODEL_TYPES)


def as_transformers_reads(described: dict[str, Any]) -> dict[str, Any]:
    """What `as_we_read` gives, from the configuration that transformers builds."""
    from transformers import AutoConfig

    model_type = described["model_type"]
    theirs = AutoConfig.for_model(**json.loads(json.dumps(described)))
    rope = theirs.rope_parameters
    found = {
        "num_layers": theirs.num_hidden_layers,
        "hidden_size": theirs.hidden_size,
        "ffn_hidden_size": theirs.intermediate_size,
        "num_attention_heads": theirs.num_attention_heads,
        "vocab_size": theirs.vocab_size,
        "max_position_embeddings": theirs.max_position_embeddings,
        "rms_norm_eps": theirs.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_factor": rope.get("factor", 1.0),
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
        "tie_word_embeddings": theirs.tie_word_embeddings,
    }
    if model_type.startswith("deepseek"):
        found |= {name: getattr(theirs, name) for name in LATENT_SIZES}
    if hasattr(theirs, "n_routed_experts"):
        found |= {
            "num_experts": theirs.n_routed_experts,
            "top_k": theirs.num_experts_per_tok,
            "expert_size": theirs.moe_intermediate_size,
            "shared_size": theirs.moe_intermediate_size * theirs.n_shared_experts,
            "dense_layers": tuple(range(theirs.first_k_dense_replace)),
            "scaling_factor": theirs.routed_scaling_factor,
            "normalise": bool(theirs.norm_topk_prob),
        }
    if model_type in ("deepseek_v3", "glm4_moe"):
        grouped = theirs.n_group > 1
        found |= {key: getattr(theirs, of) if grouped else None for key, of in GROUPS.items()}
    if model_type == "glm4_moe":
        found |= {"qkv_bias": theirs.attention_bias, "qk_norm": theirs.use_qk_norm}
    if model_type.startswith("deepseek"):
        return found
    heads = theirs.num_attention_heads
    # The models, where this is null or absent.
    found["head_dim"] = getattr(theirs, "head_dim", None) or theirs.hidden_size // heads
    found["num_query_groups"] = theirs.num_key_value_heads
    if model_type in ("qwen3_moe", "mixtral"):
        qwen, layers = model_type == "qwen3_moe", range(theirs.num_hidden_layers)
        found |= {
            "num_experts": theirs.num_experts,
            "top_k": theirs.num_experts_per_tok,
            "expert_size": theirs.moe_intermediate_size if qwen else theirs.intermediate_size,
            "dense_layers": tuple(
                i for i in layers if qwen and (i in theirs.mlp_only_layers or (i + 1) % theirs.decoder_sparse_step)
            ),
            "normalise": theirs.norm_topk_prob if qwen else True,
            "scaling_factor": 1.0,
            "shared_size": 0,
        }
    return found


GROUPS = {"num_groups": "n_group", "top_groups": "topk_group"}
LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def as_we_read(hf: HfConfig) -> dict[str, Any]:
    found = vars(hf) | {"rope_factor": (hf.rope_scaling or {}).get("factor", 1.0)}
    if hf.mla is not None:
        found |= {name: getattr(hf.mla, name) for name in LATENT_SIZES}
    if hf.moe is not None:
        found |= vars(hf.moe) | {
            "expert_size": hf.moe.ffn_hidden_size,
            "shared_size": hf.moe.shared_ffn_hidden_size,
            "normalise": hf.moe.normalise_top_k,
            "ffn_hidden_size": hf.ffn_hidden_size,
        }
    return found


def assert_same_model(described: dict[str, Any]) -> None:
    expected = as_transformers_reads(described)
    found = as_we_read(read(described))
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize("family", FULL)
def test_a_full_config_is_read_as_transformers_reads_it(family: str) -> None:
    assert_same_model(FULL[family])


@pytest.mark.parametrize("absent", [True, False], ids=["absent", "null"])
@pytest.mark.parametrize(("family", "key"), [case for case in CASES if case[1] != "model_type"])
def test_an_absent_key_gives_the_model_of_transformers_or_is_refused(family: str, key: str, absent: bool) -> None:
    described = {name: value for name, value in FULL[family].items() if name != key} | ({} if absent else {key: None})
    found = outcome(described)
    if isinstance(found, str):
        assert key in found
        return
    if key == "n_shared_experts" and not absent:
        return  # published code of this family has none then; transformers builds no model at all
    assert_same_model(described)


@pytest.mark.parametrize(
    ("family", "key", "expected"),
    [
        ("deepseek_v3", "routed_scaling_factor", {"scaling_factor": 2.5}),
        ("deepseek_v3", "first_k_dense_replace", {"dense_layers": (0, 1, 2)}),
        ("deepseek_v3", "n_shared_experts", {"shared_size": 32}),
        ("deepseek_v2", "n_shared_experts", {"shared_size": 64}),
        ("deepseek_v2", "routed_scaling_factor", {"scaling_factor": 1.0}),
        ("deepseek_v3", "q_lora_rank", {"q_lora_rank": 1536}),
        ("glm4_moe", "partial_rotary_factor", {"rotary_percent": 0.5}),
        ("glm4_moe", "attention_bias", {"qkv_bias": False}),
        ("glm4_moe", "use_qk_norm", {"qk_norm": False}),
        ("glm4_moe", "first_k_dense_replace", {"dense_layers": (0,)}),
        ("glm4_moe", "routed_scaling_factor", {"scaling_factor": 1.0}),
        ("mixtral", "rope_theta", {"rope_theta": 1e6}),
        ("llama", "rope_theta", {"rope_theta": 1e4}),
        ("qwen3", "head_dim", {"head_dim": 128}),
        ("llama", "num_key_value_heads", {"num_query_groups": 8}),
    ],
)
def test_what_absent_keys_stand_for(family: str, key: str, expected: dict[str, Any]) -> None:
    found = as_we_read(read({name: value for name, value in FULL[family].items() if name != key}))
    assert {name: found[name] for name in expected} == expected


@given(case=st.sampled_from(CASES), value=JSON | st.sampled_from(NUMBERS))
def test_any_value_of_any_key_is_read_or_refused_by_name(case: tuple[str, str], value: Any) -> None:
    family, key = case
    found = outcome(FULL[family] | {key: value})
    if isinstance(found, str):
        assert "config.json: " in found
    else:
        assert len(found.moe_layers) <= found.num_layers <= 10_000
        assert json.dumps(found.shape)


@given(name=st.sampled_from(sorted(ROPES)), value=JSON | st.sampled_from(NUMBERS), data=st.data())
def test_any_value_within_rope_is_computed_with_or_refused(name: str, value: Any, data: st.DataObject) -> None:
    from megatron_rl.policy.model import rotary_frequencies, rotary_scale

    place = data.draw(st.sampled_from(["rope_scaling", "rope_parameters"]))
    key = data.draw(st.sampled_from(sorted(ROPES[name])))
    described = {k: v for k, v in FULL["llama"].items() if k not in ("rope_scaling", "rope_theta")}
    found = outcome(described | {place: ROPES[name] | {key: value}})
    if isinstance(found, HfConfig):
        assert rotary_frequencies(found).isfinite().all()
        assert rotary_scale(found) > 0


@pytest.mark.parametrize(
    ("family", "key", "values"),
    [
        ("qwen3_moe", "mlp_only_layers", [3, [99], [-1], "8", {"a": 1}, [True]]),
        ("qwen3_moe", "norm_topk_prob", ["8", float("nan"), 1]),
        ("qwen3", "layer_types", [1, ["chunked_attention"] * 6, "full_attention"]),
        ("llama", "rope_scaling", [-1, "linear", [1], {"full_attention": {"rope_type": "default"}}]),
        ("llama", "rope_parameters", [-1, {"rope_theta": "8"}, {"rope_theta": 5e4}]),
        ("llama", "rope_theta", [float("inf"), float("nan"), 0, "8"]),
        ("llama", "head_dim", [3, 0, "8"]),
        ("llama", "num_hidden_layers", [10**12, 10**400, 10_001]),
        ("mixtral", "sliding_window", ["8", 64, float("nan")]),
        ("mistral", "sliding_window", ["8", 64, [512]]),
        ("deepseek_v3", "first_k_dense_replace", ["8", -1, 1.5, None]),
        ("deepseek_v3", "n_group", ["8", {}, 0]),
        ("deepseek_v3", "topk_group", [{}, "8", 17]),
        ("deepseek_v3", "n_shared_experts", [{}, -1, 1.5]),
        ("deepseek_v3", "routed_scaling_factor", [float("inf"), float("nan"), 0, "8"]),
        ("deepseek_v3", "qk_rope_head_dim", [7]),
        ("deepseek_v3", "n_routed_experts", [10**12, "8"]),
        ("deepseek_v2", "moe_layer_freq", [2, 0, "1", None]),
        ("glm4_moe", "partial_rotary_factor", [None, 0, 1.5, "8", float("nan"), 0.01, 0.2]),
        ("glm4_moe", "attention_bias", [None, 1, "true"]),
        ("glm4_moe", "use_qk_norm", [None, 1, "true"]),
        ("glm4_moe", "n_shared_experts", [None, {}, -1]),
        ("glm4_moe", "rope_scaling", [ROPES["yarn"]]),
        ("llama", "partial_rotary_factor", [0.5, None]),
    ],
)
def test_wrong_values_are_refused_by_name(family: str, key: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=key if key[:4] != "rope" else "rope"):
            read(FULL[family] | {key: value})


@pytest.mark.parametrize("count", [0, 5, 7])
def test_types_of_other_layers_than_there_are_are_refused(count: int) -> None:
    told = rf"config\.json: layer_types names {count} layers, and num_hidden_layers=6; copy the file"
    with pytest.raises(ConfigError, match=told):
        read(FULL["qwen3"] | {"layer_types": ["full_attention"] * count})


@pytest.mark.parametrize(
    ("kind", "key", "values"),
    [
        ("linear", "factor", ["2", float("nan"), float("inf"), -1, 0.5]),
        ("linear", "rope_theta", ["2", float("inf"), -1, 1]),
        ("linear", "partial_rotary_factor", [0.5, 0, None, "1"]),
        ("llama3", "low_freq_factor", [4.0, 5, "1", 0]),
        ("yarn", "original_max_position_embeddings", [0, 1.5, "8"]),
        ("yarn", "mscale", [-1, "1", float("nan")]),
        ("yarn", "truncate", [None, 1, "true"]),
    ],
)
def test_wrong_numbers_within_rope_are_refused_by_name(kind: str, key: str, values: list[Any]) -> None:
    described = {name: value for name, value in FULL["llama"].items() if not name.startswith("rope")}
    for value in values:
        with pytest.raises(ConfigError, match=key):
            read(described | {"rope_parameters": ROPES[kind] | {key: value}})


def test_two_names_or_places_of_one_number_must_agree() -> None:
    with pytest.raises(ConfigError, match="num_experts=16 and num_local_experts=8 differ"):
        read(FULL["qwen3_moe"] | {"num_local_experts": 8})
    with pytest.raises(ConfigError, match=r"rope_theta=500000\.0 and, within the rope parameters, 7\.0"):
        read(FULL["llama"] | {"rope_scaling": None, "rope_parameters": {"rope_theta": 7.0}})


def test_endless_nesting_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_hf_config(tmp_path)
