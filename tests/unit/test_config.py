"""Configuration: loading, nearest names, presets, and every check that must fail before a process starts."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.algorithms.spec import AdvantageSpec, LossSpec
from megatron_rl.config import Config, ConfigError, check, dump, load_config, make_plan, validate
from megatron_rl.config.shards import num_parameters
from megatron_rl.policy.microbatch import plan_microbatches

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "tie_word_embeddings": True,
}


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    prompts = tmp_path / "train.jsonl"
    prompts.write_text('{"prompt": "1", "answer": "1"}\n')
    return {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(model)},
        "data": {"prompts": str(prompts)},
        "reward": {"components": [{"name": "exact", "correctness": True}]},
        "rollout": {"max_prompt_tokens": 64, "max_response_tokens": 128},
    }


def put(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`section__key=value` changes on a copy."""
    copy = json.loads(json.dumps(values))
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            copy.setdefault(section, {})[key] = value
        else:
            copy[section] = value
    return copy


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        check(validate(values))
    return str(caught.value)


def test_a_resolved_configuration_loads_to_the_same_configuration(values: dict[str, Any], tmp_path: Path) -> None:
    config = validate(values)
    file = tmp_path / "resolved.yaml"
    file.write_text(dump(config))
    assert load_config(file) == config


def test_files_extend_each_other_and_overrides_win(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(dump(validate(values)))
    (tmp_path / "child.yaml").write_text("extends: parent.yaml\noptimizer: {lr: 1e-4, betas: [0.8, 0.9]}\n")
    config = load_config(tmp_path / "child.yaml", ["optimizer.lr=3e-4", "rollout.group_size=8"])
    assert (config.optimizer.lr, config.optimizer.betas, config.rollout.group_size) == (3e-4, (0.8, 0.9), 8)


def test_circular_extends_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ConfigError, match="circle"):
        load_config(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"optimiser": {}}, "optimiser: unknown key; did you mean optimizer?"),
        ({"parallel__tensor_parallel_size": 2}, "did you mean parallel.tensor_model_parallel_size?"),
        ({"rollout__lr": 1}, "did you mean optimizer.lr or sft.lr?"),
        ({"parallel__tp": 2}, "parallel.tp: unknown key; did you mean parallel.tensor_model_parallel_size?"),
        ({"parallel__etp": 2}, "did you mean parallel.expert_tensor_parallel_size?"),
        ({"tp": 2}, "did you mean parallel.tensor_model_parallel_size or engine.tp?"),
        ({"rollout__cp": 2}, "did you mean parallel.context_parallel_size?"),
        ({"reward": {"components": [{"name": "exact", "wieght": 1}]}}, "did you mean reward.components.0.weight?"),
        ({"optimizer__lr": [1, 2]}, "optimizer.lr=[1, 2]: input should be a valid number"),
        ({"optimizer__lr": "fast"}, "optimizer.lr='fast'"),
        ({"run_dir": ""}, "run_dir='': string should have at least 1 character"),
        ({"rollout__temperature": 1e-45}, "rollout.temperature=1e-45: input should be greater than or equal to 0.001"),
        ({"rollout__temperature": 1e39}, "rollout.temperature=1e+39: input should be less than or equal to 1000"),
        ({"rollout__top_p": 0.9}, "set top_p=1.0"),
        ({"rollout__top_k": 20}, "set top_k=-1"),
        ({"rollout__overlong_cache": 129}, "longer than max_response_tokens=128"),
        ({"rollout__overlong_cache": 0}, "rollout.overlong_cache=0"),
        ({"parallel": {"tensor_model_parallel_size": 2, "world_size": 3}}, "world_size=3, but tensor 2"),
        ({"parallel__sequence_parallel": True}, "sequence_parallel=true needs tensor_model_parallel_size > 1"),
        ({"parallel__tensor_model_parallel_size": 3}, "does not divide the model's 8 attention heads"),
        ({"parallel__tensor_model_parallel_size": 8}, "4 key/value heads; use one of [1, 2, 4]"),
        ({"parallel__pipeline_model_parallel_size": 3}, "does not divide 4 layers; use one of [1, 2, 4]"),
        (
            {
                "parallel": {
                    "tensor_model_parallel_size": 4,
                    "context_parallel_size": 2,
                    "context_parallel_exchange": "a2a",
                }
            },
            "4 key/value heads over tensor_model_parallel_size=4 x context_parallel_size=2 ranks",
        ),
        (
            {"parallel__context_parallel_size": 2, "algorithm__max_tokens_per_microbatch": 1022},
            "multiple of 4 (2 chunks for each of context_parallel_size=2), so the cap must be one; use 1020",
        ),
        ({"rollout__max_response_tokens": 200}, "exceeds the model's context of 256 tokens"),
        ({"algorithm__max_tokens_per_microbatch": 191}, "cannot hold the longest sequence of 192 tokens"),
        (
            {
                "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
                "algorithm__max_tokens_per_microbatch": 999,
            },
            "so the cap must be one; use 998",
        ),
        ({"algorithm__updates_per_batch": 3}, "does not divide rollout.groups_per_step=32"),
        ({"parallel__data_parallel_size": 3}, "does not divide the 512 samples"),
        ({"rollout__group_size": 1}, "needs at least 2"),
        ({"rollout__group_size": 1001}, "rollout.group_size=1001"),
        ({"algorithm__shift_mean": False}, "shift_mean=false has no meaning with advantage=grpo"),
        ({"data__prompts": "/nowhere.jsonl"}, "data.prompts='/nowhere.jsonl': no such file"),
        ({"eval": {"ks": [1, 4], "samples_per_prompt": 2}}, "must lie in 1 .. samples_per_prompt=2"),
        ({"model__path": "/nowhere"}, "give a Hugging Face directory"),
        ({"loss__chunk_tokens": 0}, "loss.chunk_tokens=0"),
        ({"loss__logprob_backend": "te"}, "needs Transformer Engine, which is not installed here"),
        (
            {"loss__logprob_backend": "te", "algorithm__entropy_coef": 0.01},
            "te computes no entropy, but algorithm.entropy_coef=0.01; use loss.logprob_backend=auto",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_one_message(
    values: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    assert expected in refusal(put(values, **changes))


def test_all_problems_are_listed_at_once(values: dict[str, Any]) -> None:
    message = refusal(put(values, parallel__tensor_model_parallel_size=3, rollout__max_response_tokens=500))
    assert "attention heads" in message
    assert "context of 256" in message


@pytest.mark.parametrize("word", ["steps", "=3", "--steps=3"])
def test_a_malformed_override_says_how_to_write_it(values: dict[str, Any], tmp_path: Path, word: str) -> None:
    (tmp_path / "c.yaml").write_text(dump(validate(values)))
    with pytest.raises(ConfigError, match=r"write section\.key=value"):
        load_config(tmp_path / "c.yaml", [word])


def test_an_empty_dataset_is_refused(values: dict[str, Any]) -> None:
    Path(values["data"]["prompts"]).write_text("")
    assert "the file is empty" in refusal(values)


def test_presets_lose_against_what_is_given(values: dict[str, Any]) -> None:
    given = validate(put(values, algorithm={"preset": "dapo", "eps_high": 0.3}, rollout__dynamic_sampling="mask"))
    assert (given.algorithm.eps_high, given.rollout.dynamic_sampling) == (0.3, "mask")


def test_every_option_of_the_update_reaches_the_algorithms(values: dict[str, Any]) -> None:
    given = {
        "advantage": "reinforce_pp_baseline",
        "std": "sample",
        "shift_mean": False,
        "eps_low": 0.1,
        "eps_high": 0.5,
        "dual_clip": 4.0,
        "kl_coef": 0.01,
        "kl_estimator": "k2",
        "kl_unbiased": False,
        "entropy_coef": 0.002,
    }
    algorithm = validate(put(values, algorithm=given)).algorithm
    reached = asdict(LossSpec.from_config(algorithm)) | asdict(AdvantageSpec.from_config(algorithm))
    assert {key: reached["kind" if key == "advantage" else key] for key in given} == given
    assert LossSpec.from_config(algorithm).kind == "ppo"


def test_a_bare_yaml_off_means_off(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(dump(validate(values)))
    (tmp_path / "c.yaml").write_text("extends: parent.yaml\nrollout: {dynamic_sampling: off}\n")
    assert load_config(tmp_path / "c.yaml").rollout.dynamic_sampling == "off"


def test_every_key_has_a_description() -> None:
    schema = Config.model_json_schema()
    sections = [schema, *schema["$defs"].values()]
    bare = [
        f"{s['title']}.{name}"
        for s in sections
        for name, field in s["properties"].items()
        if "description" not in field and "$ref" not in field
    ]
    assert bare == []


def test_the_plan_counts_parameters_exactly(values: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(**{k: v for k, v in MODEL.items() if k != "model_type"})
    model = transformers.Qwen3ForCausalLM(config)
    hf = check(validate(values))
    assert num_parameters(hf) == sum(p.numel() for p in model.parameters())


def test_the_plan_names_ranks_and_bytes(values: dict[str, Any]) -> None:
    parallel = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "data_parallel_size": 2}
    config = validate(put(values, parallel=parallel))
    plan = make_plan(config, check(config))
    layout = {row[0]: row[1] for row in plan["Layout"]}
    assert layout["trainer ranks"] == "8"
    assert layout["replica 1 stage 1"] == "ranks 6, 7"
    assert set(plan) == {"Layout", "Algorithm", "Batch", "Memory per rank", "Bytes per step"}


@pytest.mark.parametrize("cap", [192, 383, 384, 1000, 16384])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_plan_counts_micro_batches_as_the_trainer_does(values: dict[str, Any], cap: int, interleaved: bool) -> None:
    parallel: dict[str, Any] = {"data_parallel_size": 2}
    if interleaved:
        parallel |= {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    config = validate(put(values, parallel=parallel, algorithm__max_tokens_per_microbatch=cap))
    rows = {row[0]: row[1] for row in make_plan(config, check(config))["Batch"]}
    longest = [64 + 128] * (config.rollout.groups_per_step * config.rollout.group_size)
    planned = plan_microbatches(longest, 2, cap, config.parallel.microbatch_multiple)
    assert rows["micro-batches per update, at most"] == str(planned.num_microbatches)


@pytest.mark.parametrize("key", ["optimizer.lr", "seed", "rollout.temperature", "parallel.world_size", "eval.ks"])
def test_a_boolean_is_not_taken_for_a_number(values: dict[str, Any], key: str) -> None:
    section, _, name = key.rpartition(".")
    changed = put(values, **{f"{section}__{name}" if section else name: [True] if name == "ks" else True})
    with pytest.raises(ConfigError, match=rf"{key}: .*True.* is not a number"):
        validate(changed)


@pytest.mark.parametrize("word", ["model=[]", "parallel=[1]", "reward.components={a: 1}", "data.prompts=[1]"])
def test_a_list_in_the_place_of_a_mapping_is_named(tmp_path: Path, values: dict[str, Any], word: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        load_config(file, [word])


def test_a_parent_with_a_list_where_the_child_has_a_mapping_is_named(tmp_path: Path, values: dict[str, Any]) -> None:
    (tmp_path / "parent.yaml").write_text(json.dumps({**values, "optimizer": []}))
    (tmp_path / "child.yaml").write_text("extends: parent.yaml\noptimizer: {lr: 1}\n")
    with pytest.raises(ConfigError, match=r"optimizer: .*child\.yaml has a list where a mapping"):
        load_config(tmp_path / "child.yaml")


@pytest.mark.parametrize(
    "key", ["rollout__step_timeout_s", "cluster__stop_timeout_s", "engine__ready_timeout_s", "reward__timeout_s"]
)
def test_deadlines_that_timers_cannot_hold_are_refused(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match="less than or equal to 1000000"):
        validate(put(values, **{key: 1e308}))


def test_metrics_that_a_run_acts_on_must_be_measured(values: dict[str, Any]) -> None:
    prompts = values["data"]["prompts"]
    wrong = put(
        put(values, sft__data=prompts, data__eval_prompts=prompts, checkpoint__metric="eval/pass_at_8"),
        sft__stop_value=0.5,
    )
    with pytest.raises(ConfigError) as caught:
        check(validate(wrong))
    assert "sft.stop_metric='format_valid' is not measured; one of pass_at_1, reward_mean" in str(caught.value)
    assert "checkpoint.metric='eval/pass_at_8' is not measured" in str(caught.value)
    measured = put(wrong, reward__components=[{"name": "countdown_format"}], checkpoint__keep_best=False)
    check(validate(measured))


def test_a_directory_in_the_place_of_a_prompt_file_is_refused(values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.eval_prompts=.*: not a regular file"):
        check(validate(put(values, data__eval_prompts=str(tmp_path))))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads=0 is not a positive whole number"),
        ({"num_attention_heads": "eight"}, "num_attention_heads='eight' is not a positive whole number"),
        ({"num_attention_heads": 6}, "num_attention_heads=6 is no multiple of num_key_value_heads=4"),
        ({"rms_norm_eps": True}, "rms_norm_eps=True is not a positive number"),
    ],
)
def test_impossible_numbers_of_a_model_are_named(values: dict[str, Any], change: dict[str, Any], expected: str) -> None:
    (Path(values["model"]["path"]) / "config.json").write_text(json.dumps(MODEL | change))
    with pytest.raises(ConfigError, match=re.escape(expected)):
        check(validate(values))


DEEP = b'{"a":' + b"[" * 100_000


@pytest.mark.parametrize("content", [b"[1]", b"3", b"\xff\xfe\x00", b"{", DEEP])
def test_a_config_json_that_is_no_object_is_refused(values: dict[str, Any], content: bytes) -> None:
    (Path(values["model"]["path"]) / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json: .*copy the file from the model again"):
        check(validate(values))


@pytest.mark.parametrize(
    "url", ["nonsense", "", "localhost:30000", "http://", "ftp://h:1", "http://h:port", "http://[:1"]
)
def test_what_is_no_address_of_a_server_is_refused(values: dict[str, Any], url: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"engine.urls: {url!r} is not the address of a server")):
        validate(put(values, engine__urls=["http://127.0.0.1:30000", url]))


def test_a_server_that_stands_twice_is_refused_whatever_its_address_ends_with(values: dict[str, Any]) -> None:
    assert validate(put(values, engine__urls=["http://a:1/"])).engine.urls == ["http://a:1"]
    with pytest.raises(ConfigError, match="every server may stand once"):
        validate(put(values, engine__urls=["http://h:1", "http://h:1/"]))


def test_a_reference_to_a_missing_value_names_both_and_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: a\nmodel: {path: '${run_dir}/model'}\n")
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "run.yaml")
    assert str(error.value) == (
        f"{tmp_path}/run.yaml: model.path refers to ${{run_dir}}, which is not given; "
        "add it to the file or as run_dir=... on the command line"
    )
