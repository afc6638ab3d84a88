"""Files that are well-formed in part only: JSON of another type, bytes that belong to no tensor, links to nowhere."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import ConfigError
from megatron_rl.weights import WeightsError
from megatron_rl.weights.convert import actions
from megatron_rl.weights.convert.cuts import TargetLayout
from megatron_rl.weights.convert.opened import open_checkpoint
from megatron_rl.weights.convert.torch_dist import Chunk, Place, _fill
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


def rewrite_metadata(folder: Path, change: Callable[[Any], object]) -> None:
    """Read and write .metadata with no reader of ours."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.fixture
def megatron(hf: Path, tmp_path: Path) -> Path:
    source = open_checkpoint(hf)
    convert(actions.hf_to_megatron(source, tmp_path / "m", TargetLayout(2), None))
    return tmp_path / "m"


def shift(metadata: Any) -> None:
    """Let the second half of the embedding begin and end a row too early: a row is there twice, the last one never."""
    name = "embedding.word_embeddings.weight"
    facts = metadata.state_dict_metadata[name]
    (place,) = (index for index in metadata.storage_data if index.fqn == name and index.offset[0])
    early = torch.Size([place.offset[0] - 1, 0])
    chunk = next(chunk for chunk in facts.chunks if chunk.offsets == place.offset)
    chunk.offsets = early
    metadata.storage_data[type(place)(name, early)] = metadata.storage_data.pop(place)


def test_chunks_that_overlap_and_leave_a_gap_are_refused(megatron: Path, tmp_path: Path) -> None:
    rewrite_metadata(megatron / "release", shift)
    for make in (
        lambda: actions.megatron_to_hf(open_checkpoint(megatron), tmp_path / "out", None),
        lambda: actions.reshard(open_checkpoint(megatron), tmp_path / "out", TargetLayout()),
    ):
        with pytest.raises(WeightsError, match=r"word_embeddings\.weight: its chunks overlap, or leave numbers out"):
            make()


@given(st.data())
def test_boxes_fill_a_tensor_if_they_cut_it_up_and_not_when_one_is_moved_or_missing(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(data.draw(st.integers(0, 4))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        axis = data.draw(st.integers(0, len(shape) - 1))
        begin, end = box[axis]
        middle = data.draw(st.integers(begin, end))
        boxes += [(*box[:axis], part, *box[axis + 1 :]) for part in ((begin, middle), (middle, end))]

    def are_all(found: list[tuple[tuple[int, int], ...]]) -> bool:
        place = Place(Path("x"), 0, 0)
        return _fill(shape, [Chunk(tuple(b for b, _ in x), tuple(e - b for b, e in x), place) for x in found])

    assert are_all(boxes)
    number = data.draw(st.integers(0, len(boxes) - 1))
    if all(begin < end for begin, end in boxes[number]):
        moved = ((boxes[number][0][0] + 1, boxes[number][0][1] + 1), *boxes[number][1:])
        others = boxes[:number] + boxes[number + 1 :]
        assert not are_all(others)
        assert not are_all([*others, moved])
        assert not are_all([*boxes, boxes[number]])


@pytest.mark.parametrize(
    "change",
    [
        lambda metadata: metadata.__dict__.update(storage_data=None),
        lambda metadata: metadata.__dict__.pop("state_dict_metadata"),
        lambda metadata: [setattr(place, "offset", "0") for place in metadata.storage_data.values()],
        lambda metadata: [setattr(place, "length", -1) for place in metadata.storage_data.values()],
        lambda metadata: [setattr(place, "length", 1) for place in metadata.storage_data.values()],
        lambda metadata: [setattr(place, "relative_path", None) for place in metadata.storage_data.values()],
        lambda metadata: [setattr(t.properties, "dtype", 3) for t in tensors_of(metadata)],
        lambda metadata: [setattr(t, "size", (2**62, None)) for t in tensors_of(metadata)],
        lambda metadata: [setattr(t, "chunks", 5) for t in tensors_of(metadata)],
    ],
)
def test_metadata_of_another_kind_is_one_message(change: Callable[[Any], object], megatron: Path) -> None:
    rewrite_metadata(megatron / "release", change)
    with pytest.raises(WeightsError, match=r"\.metadata: cannot be read \(.*\); copy the checkpoint again"):
        open_checkpoint(megatron)


def tensors_of(metadata: Any) -> list[Any]:
    return [facts for facts in metadata.state_dict_metadata.values() if hasattr(facts, "chunks")]


def test_metadata_with_other_bytes_is_read_or_one_message(megatron: Path) -> None:
    file, random = megatron / "release" / ".metadata", Random(0)
    raw = file.read_bytes()
    refused = 0
    for _ in range(300):
        damaged = bytearray(raw)
        for _ in range(random.choice((1, 1, 4))):
            damaged[random.randrange(len(raw))] = random.randrange(256)
        file.write_bytes(damaged)
        try:
            open_checkpoint(megatron)
        except WeightsError:
            refused += 1
    assert refused > 100
