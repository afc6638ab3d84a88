"""Files that are well-formed in part only: JSON of another type, bytes that belong to no tensor, links to nowhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config import ConfigError
from megatron_rl.weights import WeightsError
from megatron_rl.weights.convert import actions
from megatron_rl.weights.convert.cuts import TargetLayout
from megatron_rl.weights.convert.opened import open_checkpoint
from megatron_rl.weights.reader import INDEX, SafetensorsReader
from megatron_rl.weights.safetensors_file import header_of, read_header
from tests.convert_models import convert, write_model

NESTED = b'{"a":' + b"[" * 100_000
NOT_OBJECTS = (b"[]", b"3", b"null", b'"text"', b"\xff\xfe\xfd", NESTED)
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "hf"
    write_model(path)
    return path


@pytest.fixture
def hf(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "hf"))


def plan(hf: Path, out: Path) -> actions.Conversion:
    return actions.hf_to_megatron(open_checkpoint(hf), out, TargetLayout(), None)


def header(path: Path, text: bytes, data: bytes = b"") -> Path:
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("content", NOT_OBJECTS)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", INDEX, FILE])
def test_json_that_is_no_object_is_one_message(name: str, content: bytes, hf: Path, tmp_path: Path) -> None:
    if name == FILE:
        header(hf / name, content)
    else:
        (hf / name).write_bytes(content)
    with pytest.raises((WeightsError, ConfigError), match=rf"{name}: .* again"):
        plan(hf, tmp_path / "out")


@pytest.mark.parametrize("content", NOT_OBJECTS)
def test_a_journal_that_is_no_object_begins_anew(content: bytes, hf: Path, tmp_path: Path) -> None:
    (tmp_path / ".converting-out").mkdir()
    (tmp_path / ".converting-out" / "journal-00000.json").write_bytes(content)
    assert convert(plan(hf, tmp_path / "out")).kept == 0


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [2.0]},
        {"shape": [None]},
        {"shape": [True]},
        {"shape": [-2]},
        {"shape": "2"},
        {"data_offsets": ["0", "8"]},
        {"data_offsets": [None, 8]},
        {"data_offsets": [0]},
        {"data_offsets": 8},
        {"dtype": ["F32"]},
        {"dtype": None},
    ],
)
def test_a_header_entry_of_another_type_is_named(entry: dict[str, Any], tmp_path: Path) -> None:
    facts = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert read_header(header(tmp_path / FILE, json.dumps({"w": facts}).encode(), bytes(8)))["w"].shape == (2,)
    file = header(tmp_path / FILE, json.dumps({"w": facts | entry}).encode(), bytes(8))
    with pytest.raises(WeightsError, match=r"the header's entry of 'w' is damaged; copy the file again"):
        read_header(file)


@pytest.mark.parametrize(("second", "size"), [([4, 12], 12), ([16, 24], 24), ([0, 8], 8)])
def test_bytes_that_belong_to_no_tensor_or_to_two_are_refused(second: list[int], size: int, tmp_path: Path) -> None:
    entries = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": second},
    }
    file = header(tmp_path / FILE, json.dumps(entries).encode(), bytes(size))
    with pytest.raises(WeightsError, match=r"'[ab]' begins at byte \d+, and what is before it ends at \d+"):
        read_header(file)


def test_tensors_without_numbers_take_no_bytes(tmp_path: Path) -> None:
    text = header_of([("a", (2,), torch.float32), ("none", (0, 3), torch.float32), ("b", (1,), torch.float32)])
    (tmp_path / FILE).write_bytes(text + bytes(12))
    assert [tensor.nbytes for tensor in read_header(tmp_path / FILE).values()] == [8, 0, 4]


@pytest.mark.parametrize("file", [3, None, True, [FILE], "x" * 5000])
def test_an_index_whose_files_have_no_names_is_refused(file: object, hf: Path) -> None:
    (hf / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
    with pytest.raises(WeightsError, match="index"):
        SafetensorsReader(hf)


def add_token(number: object) -> Callable[[dict[str, Any]], object]:
    return lambda tokenizer: tokenizer["added_tokens"].append({"id": number})


@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer: tokenizer["model"].update(vocab="text"),
        lambda tokenizer: tokenizer["model"].update(vocab=None),
        lambda tokenizer: tokenizer["model"]["vocab"].update(t1="1"),
        lambda tokenizer: tokenizer["model"]["vocab"].update(t1=None),
        add_token([1]),
        add_token("1"),
        lambda tokenizer: tokenizer.update(added_tokens=[1]),
    ],
)
def test_a_tokenizer_of_other_types_is_refused(
    change: Callable[[dict[str, Any]], object], hf: Path, tmp_path: Path
) -> None:
    tokenizer = json.loads((hf / "tokenizer.json").read_text())
    change(tokenizer)
    (hf / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(WeightsError, match=r"tokenizer\.json: not a tokenizer"):
        plan(hf, tmp_path / "out")


@pytest.mark.parametrize("content", [b"abc", b"", b"\xff\xfe", b"-1", b"1.5"])
def test_a_name_of_the_newest_checkpoint_that_is_none_is_refused(content: bytes, hf: Path, tmp_path: Path) -> None:
    convert(plan(hf, tmp_path / "m"))
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_bytes(content)
    with pytest.raises(WeightsError, match=r"iteration\.txt: .* is neither an iteration nor 'release'"):
        open_checkpoint(tmp_path / "m")


def test_a_link_to_nowhere_is_refused_before_anything_is_written(hf: Path, tmp_path: Path) -> None:
    (hf / "merges.txt").symlink_to("blobs/gone")
    source = open_checkpoint(hf)
    for make in (lambda: plan(hf, tmp_path / "out"), lambda: actions.cast(source, tmp_path / "out", torch.float16)):
        with pytest.raises(WeightsError, match=r"merges\.txt: a link to blobs/gone, which is not there; copy the file"):
            make()
