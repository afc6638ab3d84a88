"""What is found out about a run's inputs before any process starts, on real files."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from megatron_rl.audit import cursor_of
from megatron_rl.cli import app, main
from megatron_rl.config import Config, ConfigError, dump, read_hf_config
from megatron_rl.config.cluster import ClusterConfig
from megatron_rl.data import DataError
from megatron_rl.data.tiny_model import write_tiny_model
from megatron_rl.policy import checkpoint
from megatron_rl.policy.checkpoint import CheckpointError
from megatron_rl.preflight import check_device, check_inputs, check_plan, checkpoint_to_resume
from megatron_rl.rewards.registry import RewardError
from megatron_rl.rollout.controller import Prompts
from megatron_rl.rollout.wire import encode
from megatron_rl.weights.fp8 import SUFFIX, quantise

from .rollout_rig import config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, seed=0)
    return folder


Spoil = Callable[[dict[str, Any], dict[str, Any]], Any]
"""Changes config.json, or the tensors by name."""
INDEX = "model.safetensors.index.json"
LAYER = "model.layers.0."


def spoilt(model: Path, folder: Path, spoil: Spoil) -> Path:
    shutil.copytree(model, folder)
    facts, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    spoil(facts, tensors)
    (folder / "config.json").write_text(json.dumps(facts))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda f, t: t.pop("model.norm.weight"), r"model\.norm\.weight missing"),
        (lambda f, t: t.update(extra=torch.zeros(1)), "extra have no place in a 'qwen3' model"),
        (lambda f, t: f.update(num_hidden_layers=4), r"model\.layers\.2\..* missing"),
        (lambda f, t: f.update(num_hidden_layers=1), r"model\.layers\.1\..* have no place"),
        (
            lambda f, t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
            r"lm_head\.weight is not model\.embed_tokens\.weight, though config\.json says tie_word_embeddings=true",
        ),
        (lambda f, t: f.update(hidden_size=4096), r"has shape \[\d+, 128\] where config\.json says \[\d+, 4096\]"),
        (
            lambda f, t: t.update({LAYER + "self_attn.q_proj.weight": torch.zeros(64, 128)}),
            r"q_proj\.weight has shape \[64, 128\] where config\.json says \[128, 128\]",
        ),
        (lambda f, t: t.update({"model.norm.weight": torch.zeros(128, dtype=torch.float64)}), "has dtype float64"),
        (
            lambda f, t: t.update({"model.norm.weight": torch.zeros(128).to(torch.float8_e4m3fn)}),
            r"model\.norm\.weight has dtype float8_e4m3fn",
        ),
    ],
)
def test_weights_that_do_not_fit_their_config_are_refused(tmp_path: Path, model: Path, spoil: Spoil, told: str) -> None:
    folder = spoilt(model, tmp_path / "spoilt", spoil)
    refused(tmp_path, folder, told)


def refused(tmp_path: Path, folder: Path, told: str) -> None:
    cfg = config(tmp_path / "run", folder, [], reward=reward("tests.unit.rollout_hooks:even_count"))
    for look in (check_inputs, check_plan):
        with pytest.raises(ConfigError, match=r"model\.path: .*" + told):
            look(cfg)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda m: m.pop("model.layers.0.mlp.gate.weight"), r"model\.layers\.0\.mlp\.gate\.weight missing"),
        (lambda m: m.update({"model.layers.0.mlp.experts.8.up_proj.weight": "x"}), "x: file is missing"),
    ],
)
def test_experts_that_do_not_fit_their_config_are_refused(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], Any], told: str
) -> None:
    folder = tmp_path / "experts"
    write_tiny_model(folder, seed=0, experts=8)
    with_16 = shutil.copytree(folder, tmp_path / "with_16")
    facts = json.loads((folder / "config.json").read_text())
    (with_16 / "config.json").write_text(json.dumps(facts | {"num_experts": 16}))
    refused(tmp_path, with_16, r"mlp\.experts\.10\.down_proj\.weight.* missing")
    tensors = load_file(folder / "model.safetensors")
    where = dict.fromkeys(tensors, "model.safetensors")
    spoil(where)
    save_file({name: tensors[name] for name in where if name in tensors}, folder / "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    refused(tmp_path, folder, told)


def test_numbers_in_blocks_and_a_config_that_does_not_say_so_are_refused(tmp_path: Path, model: Path) -> None:
    def in_blocks(facts: dict[str, Any], tensors: dict[str, Any]) -> None:
        name = LAYER + "self_attn.q_proj.weight"
        tensors[name], tensors[name + SUFFIX] = quantise(tensors[name])

    refused(tmp_path, spoilt(model, tmp_path / "blocks", in_blocks), "only the weights are")


NO_INDEX = (b"[1]", b'{"weight_map": ["a"]}', b'{"weight_map": {"a": 3}}', b"\xff", b'{"a":' + b"[" * 100_000)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("model.safetensors", None, r"model\.safetensors: file is missing"),
        ("model.safetensors", b"\1\2", r"model\.safetensors: unreadable or cut short"),
        (INDEX, b'{"weight_map": {}}', "missing; config.json and weights do not belong together"),
        (INDEX, b'{"weight_map": {"a": "model-2.safetensors"}}', r"model-2\.safetensors: file is missing"),
        *((INDEX, content, "not a safetensors index") for content in NO_INDEX),
    ],
)
def test_files_that_hold_no_weights_are_refused(
    tmp_path: Path, model: Path, name: str, content: bytes | None, told: str
) -> None:
    folder = shutil.copytree(model, tmp_path / "broken")
    if content is None:
        (folder / name).unlink()
        (folder / "model.safetensors.other").touch()  # weights of a kind, so that a plan does not go without
    else:
        (folder / name).write_bytes(content)
    refused(tmp_path, folder, told)


def reward(*names: str) -> dict[str, Any]:
    return {"components": [{"name": name} for name in names], "workers": 1}


@pytest.mark.parametrize("name", ["exact", "sorting", "sorting_format", "countdown", "math"])
@pytest.mark.parametrize("key", ["prompts", "eval_prompts"])
def test_a_record_without_the_answer_that_its_verifier_needs_is_named(
    tmp_path: Path, model: Path, name: str, key: str
) -> None:
    file = tmp_path / "bare.jsonl"
    file.write_text('{"prompt": "1", "answer": "1"}\n{"prompt": "2"}\n')
    data = {"prompts": str(file), key: str(file)}
    cfg = config(tmp_path / "run", model, [], reward=reward(name), data=data)
    with pytest.raises(DataError, match=r'bare\.jsonl:2: key "answer" is missing'):
        check_inputs(cfg)


def test_sglang_is_looked_for_only_when_the_run_is_to_start_it(tmp_path: Path, model: Path) -> None:
    engine = {"kind": "sglang", "python": "/nonexistent"}
    with pytest.raises(ConfigError, match=r"engine\.python=/nonexistent: no such file; launch/install_sglang\.sh"):
        check_inputs(config(tmp_path / "run", model, [], engine=engine))
    check_inputs(config(tmp_path / "run", model, ["http://there:1"], engine={**engine, "urls": ["http://there:1"]}))


def test_no_answer_is_asked_for_that_no_verifier_needs(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "bare.jsonl"
    file.write_text(json.dumps({"prompt": "2"}) + "\n")
    names = ("countdown_format", "tests.unit.rollout_hooks:even_count")
    check_inputs(config(tmp_path / "run", model, [], reward=reward(*names), data={"prompts": str(file)}))


def test_an_environment_is_loaded_and_its_place_in_the_chat_template_looked_for(tmp_path: Path, model: Path) -> None:
    hooks = "tests.unit.environment_hooks"

    def checked(name: str, *components: str, **data: str) -> None:
        rollout = {"environment": f"{hooks}:{name}"} if name else {}
        names = components or ("tests.unit.rollout_hooks:even_count",)
        check_inputs(config(tmp_path / "run", model, [], reward=reward(*names), rollout=rollout, data=data))

    checked("Counts", "environment")
    with pytest.raises(ConfigError, match=r"rollout\.environment='.*:Missing': .* has no 'Missing'"):
        checked("Missing")
    with pytest.raises(ConfigError, match="environment is what an environment gives for its turns; set rollout"):
        checked("", "environment")
    template = tmp_path / "first_message_only.jinja"
    template.write_text("{{ messages[0].content }}=")
    with pytest.raises(DataError, match="does not put a message of role 'tool' behind an answer"):
        checked("Faulty", chat_template=str(template))


def test_the_command_says_that_the_inputs_are_well_and_starts_nothing(tmp_path: Path, model: Path) -> None:
    cfg = config(tmp_path / "run", model, [], reward=reward("tests.unit.rollout_hooks:even_count"))
    (tmp_path / "mine.yaml").write_text(dump(cfg))
    before = sorted((tmp_path / "run").rglob("*"))
    said = CliRunner().invoke(app, ["preflight", str(tmp_path / "mine.yaml")])
    assert (said.exit_code, said.output) == (0, "inputs: OK, 40 prompts (0 rejected as too long)\n")
    assert sorted((tmp_path / "run").rglob("*")) == before


def test_other_prompts_than_those_of_the_run_are_refused_whatever_its_config_says(tmp_path: Path, model: Path) -> None:
    run, first, other = tmp_path / "run", tmp_path / "first.jsonl", tmp_path / "other.jsonl"
    first.write_text(json.dumps({"prompt": "2"}) + "\n")
    other.write_text(first.read_text() + json.dumps({"prompt": "3"}) + "\n")
    named = ("tests.unit.rollout_hooks:even_count",)
    mine, theirs = (config(run, model, [], reward=reward(*named), data={"prompts": str(f)}) for f in (first, other))
    save(mine, check_inputs(mine).prompts)
    (run / "config.yaml").write_text(dump(theirs))
    assert checkpoint_to_resume(mine, check_inputs(mine).prompts, None) == run / "checkpoints" / "step-000001"
    told = rf"data\.prompts={other} does not go on with {run}/checkpoints/step-000001: .*size 1 then, 2 now"
    with pytest.raises(DataError, match=told):
        checkpoint_to_resume(theirs, check_inputs(theirs).prompts, None)
    reordered = mine.model_copy(update={"seed": 5})
    with pytest.raises(DataError, match="seed 3 then, 5 now"):
        checkpoint_to_resume(reordered, check_inputs(reordered).prompts, None)


def test_a_model_of_another_shape_than_the_run_s_is_refused_before_anything_starts(tmp_path: Path, model: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "2"}) + "\n")
    other = shutil.copytree(model, tmp_path / "other")
    facts = json.loads((other / "config.json").read_text())
    layers = facts["num_hidden_layers"]
    (other / "config.json").write_text(json.dumps(facts | {"num_hidden_layers": layers + 1}))
    sections = {"reward": reward("tests.unit.rollout_hooks:even_count"), "data": {"prompts": str(prompts)}}
    mine, theirs = (config(tmp_path / "run", path, [], **sections) for path in (model, other))
    save(mine, Prompts(mine))
    told = (
        rf"step-000001 holds another model than model.path={other}: num_layers {layers} there, {layers + 1} here\. No"
    )
    with pytest.raises(CheckpointError, match=told):
        checkpoint_to_resume(theirs, Prompts(theirs), None)


@pytest.mark.parametrize(("steps", "told"), [((2, 4), "those of: 2, 4; give one"), ((), "none; begin without")])
def test_a_step_to_resume_from_that_was_not_saved_is_refused_with_those_that_were(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    steps: tuple[int, ...],
    told: str,
) -> None:
    run = tmp_path / "run"
    for step in steps:
        (run / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    file = tmp_path / "mine.yaml"
    file.write_text(dump(config(run, model, [], reward=reward("tests.unit.rollout_hooks:even_count"))))
    monkeypatch.setattr(sys, "argv", ["megatron-rl", "train", str(file), "--resume-from", "3"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"--resume-from=3: {run}/checkpoints has no checkpoint of step 3; it has {told}" in capsys.readouterr().err
    assert not (run / "logs").exists()


def save(cfg: Config, prompts: Prompts) -> None:
    """A checkpoint of step 1, as far as prompts are concerned."""
    books = {"cursor": cursor_of(cfg, prompts).state_dict(), "partial": []}
    controller = encode({}, {"state": {"pool": books}, "groups": []})
    checkpoint.begin(Path(cfg.run_dir), 1)
    facts = {"metric": None, "layout": {}, "config_hash": "", "digests": {}}
    shape = read_hf_config(cfg.model.path).shape
    checkpoint.complete(Path(cfg.run_dir), 1, {"controller": controller}, model=shape, **facts)


@pytest.mark.parametrize(
    ("build", "devices", "expected"),
    [
        (None, 0, "is a build without CUDA; install one with it, or set cluster.device=cpu"),
        ("12.8", 0, "no device is found; look at nvidia-smi and CUDA_VISIBLE_DEVICES"),
        ("12.8", 1, "this machine shows 1 of the 2 devices that section `parallel` needs here"),
    ],
)
def test_cuda_that_is_asked_for_and_absent_is_one_message(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, build: str | None, devices: int, expected: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    parallel = {"tensor_model_parallel_size": 2}
    asked = config(tmp_path / "run", model, [], cluster={"device": "cuda"}, parallel=parallel)
    with pytest.raises(ConfigError, match="cluster.device=cuda: .*" + expected):
        check_device(asked)
    check_device(asked.model_copy(update={"cluster": ClusterConfig(device="auto")}))


def test_a_missing_package_for_logging_is_found_before_anything_starts(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what Python does for a module that cannot be found
    with pytest.raises(ConfigError, match=r"pip install 'megatron-rl\[wandb\]'"):
        check_inputs(config(tmp_path / "run", model, [], logging={"wandb": True}))


def test_a_verifier_that_needs_a_process_is_refused_where_there_is_none(tmp_path: Path, model: Path) -> None:
    with pytest.raises(RewardError, match=r"reward\.workers"):
        check_inputs(config(tmp_path / "run", model, [], reward={**reward("math"), "workers": 0}))
