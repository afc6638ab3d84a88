"""A config.json that is not the one of the weights is refused, or noticed by a rerun, and never mixed with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config import read_hf_config
from megatron_rl.weights import WeightsError
from megatron_rl.weights.convert import actions, job
from megatron_rl.weights.convert.cuts import TargetLayout
from megatron_rl.weights.convert.opened import open_checkpoint
from tests.convert_models import contents, convert, write_config, write_model
from tests.unit.test_convert_resume import die_when, in_a_child

FILE = "model.safetensors"
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
OTHER_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6}
"""The same rows of q, k and v, dealt to other heads."""


def to_megatron(hf: Path, out: Path) -> actions.Conversion:
    return actions.hf_to_megatron(open_checkpoint(hf), out, TargetLayout(), None)


def to_hf(megatron: Path, out: Path, hf: Path | None = None) -> actions.Conversion:
    return actions.megatron_to_hf(open_checkpoint(megatron, hf), out, None)


def set_config(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize("verb", ["hf-to-megatron", "megatron-to-hf"])
def test_a_rerun_after_a_correction_of_config_json_begins_anew(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = tmp_path / "hf"
    write_model(hf, **HEADS)
    convert(to_megatron(hf, tmp_path / "m"))
    named = {"hf-to-megatron": hf, "megatron-to-hf": tmp_path / "m" / "hf"}[verb]

    def make(out: Path) -> actions.Conversion:
        return to_megatron(hf, out) if verb == "hf-to-megatron" else to_hf(tmp_path / "m", out)

    with monkeypatch.context() as patch:
        die_when(patch, job, "_complete", 1)
        assert in_a_child(lambda: convert(make(tmp_path / "out"))) < 0
    set_config(named, **OTHER_HEADS)
    assert convert(make(tmp_path / "out")).kept == 0
    convert(make(tmp_path / "whole"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"vocab_size": 40}, "vocab_size 50 there, 40 here"),
        ({"vocab_size": 60}, "vocab_size 50 there, 60 here"),
        (
            OTHER_HEADS,
            "num_attention_heads 4 there, 8 here, num_query_groups 2 there, 4 here, head_dim 12 there, 6 here",
        ),
        ({"num_key_value_heads": 4}, "num_query_groups 2 there, 4 here"),
        ({"num_hidden_layers": 1}, "num_layers 2 there, 1 here"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings False there, True here"),
        ({"rope_theta": 50.0}, r"rope_theta 10000\.0 there, 50\.0 here"),
        ({"rms_norm_eps": 0.1}, r"rms_norm_eps 1e-06 there, 0\.1 here"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling None there, {.*'factor': 2.0.*} here"),
    ],
)
@pytest.mark.parametrize("recorded", ["hf", "manifest"])
def test_another_model_than_the_checkpoint_says_it_holds_is_refused(
    recorded: str, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    tensors = write_model(tmp_path / "hf", **HEADS)
    convert(to_megatron(tmp_path / "hf", tmp_path / "m"))
    checkpoint = tmp_path / "m"
    if recorded == "manifest":
        checkpoint = tmp_path / "step-000001"
        shutil.copytree(tmp_path / "m" / "release", checkpoint / "policy")
        (checkpoint / "manifest.json").write_text(json.dumps({"model": read_hf_config(tmp_path / "hf").shape}))
    write_config(tmp_path / "other", **HEADS | settings)
    with pytest.raises(WeightsError, match=f"holds another model than .*other: {words}; give the Hugging Face dir"):
        open_checkpoint(checkpoint, tmp_path / "other")
    write_config(tmp_path / "longer", **HEADS, max_position_embeddings=128)
    convert(to_hf(checkpoint, tmp_path / "back", tmp_path / "longer"))
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(tmp_path / "back" / FILE).items())


@pytest.mark.parametrize("content", [b"[]", b"\xff", b"{"])
def test_a_manifest_that_cannot_be_read_is_named(content: bytes, tmp_path: Path) -> None:
    write_model(tmp_path / "hf")
    convert(to_megatron(tmp_path / "hf", tmp_path / "m"))
    shutil.copytree(tmp_path / "m" / "release", tmp_path / "step" / "policy")
    (tmp_path / "step" / "manifest.json").write_bytes(content)
    with pytest.raises(WeightsError, match=r"manifest\.json: cannot be read"):
        open_checkpoint(tmp_path / "step", tmp_path / "hf")


@pytest.mark.parametrize("change", ["none", "number", "rows", "dtype"])
def test_an_output_layer_of_its_own_in_a_tied_model_is_refused(change: str, tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "hf", tie_word_embeddings=True)
    head = tensors["model.embed_tokens.weight"].clone()
    if change == "number":
        head[3, 3] += 1
    elif change == "rows":
        head = head[:-1].clone()
    elif change == "dtype":
        head = head.to(torch.float16)
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "hf" / FILE)
    if change == "none":
        assert "lm_head.weight" not in open_checkpoint(tmp_path / "hf").as_hf()
        return
    with pytest.raises(WeightsError, match=r"lm_head\.weight is not model\.embed_tokens\.weight, .* set it to false"):
        to_megatron(tmp_path / "hf", tmp_path / "out")
