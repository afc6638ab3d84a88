"""What is wrong with a source, a target or an option is one message that names it and says what to do."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import random
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron_rl.config import ConfigError, read_hf_config
from megatron_rl.weights import WeightsError
from megatron_rl.weights.convert import actions, job
from megatron_rl.weights.convert.compare import compare
from megatron_rl.weights.convert.cuts import TargetLayout
from megatron_rl.weights.convert.opened import open_checkpoint
from megatron_rl.weights.convert.read_sums import ReadSums
from megatron_rl.weights.convert.restricted_pickle import UnknownName, read_array
from megatron_rl.weights.convert.torch_dist import is_weight
from tests.convert_models import convert, silent, write_config, write_model

FILE = "model.safetensors"


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    write_model(tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture
def megatron(hf: Path, tmp_path: Path) -> Path:
    to_megatron(hf, tmp_path / "megatron")
    return tmp_path / "megatron"


def to_megatron(source: Path, out: Path, **layout: int) -> None:
    convert(actions.hf_to_megatron(open_checkpoint(source), out, TargetLayout(**layout), None))


def change(path: Path, function: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / FILE)
    function(tensors)
    save_file(tensors, path / FILE)


def edit_header(path: Path, function: Callable[[str], str]) -> None:
    """Change the header's text, and its length as needed."""
    raw = (path / FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = function(raw[8 : 8 + length].decode()).encode()
    (path / FILE).write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


def split(path: Path) -> None:
    """Two files and an index."""
    tensors = load_file(path / FILE)
    where = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, path / file)
    (path / FILE).unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def test_damaged_hugging_face_files_are_named(hf: Path, tmp_path: Path) -> None:
    def garbage(path: Path) -> None:
        (path / FILE).write_bytes(b"not a model" * 100)

    def torn_header(path: Path) -> None:
        edit_header(path, lambda text: text.replace('"shape"', "shape", 1))

    def truncated(path: Path) -> None:
        (path / FILE).write_bytes((path / FILE).read_bytes()[:-1])

    def missing_shard(path: Path) -> None:
        split(path)
        (path / "model-00002-of-00002.safetensors").unlink()

    def twice_in_one_file(path: Path) -> None:
        edit_header(path, lambda text: text.replace('"model.norm.weight"', '"lm_head.weight"'))

    def twice_in_two_files(path: Path) -> None:
        split(path)
        shutil.copy(path / "model-00001-of-00002.safetensors", path / "model-00002-of-00002.safetensors")
        index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        kept = {name: file for name, file in index.items() if "00001" in file}
        kept[next(iter(kept))] = "model-00002-of-00002.safetensors"
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": kept}))

    def unknown_dtype(path: Path) -> None:
        edit_header(path, lambda text: text.replace('"F32"', '"F4"', 1))

    def lying_header(path: Path) -> None:
        edit_header(path, lambda text: text.replace('"F32"', '"F16"', 1))

    def pickled(path: Path) -> None:
        torch.save({}, path / "pytorch_model.bin")
        (path / FILE).unlink()

    def bad_index(path: Path) -> None:
        (path / "model.safetensors.index.json").write_text("[1]")

    for damage, words in (
        (garbage, "unreadable or cut short .* copy the file again"),
        (torn_header, "its header is damaged"),
        (truncated, "cut short .* copy the file again"),
        (missing_shard, "model-00002-of-00002.safetensors: file is missing; copy it again"),
        (twice_in_one_file, "'lm_head.weight' is there twice"),
        (twice_in_two_files, "is in model-00001-of-00002.safetensors as well"),
        (unknown_dtype, "has dtype F4, which cannot be read; convert the file to one of F64, F32"),
        (lying_header, "and dtype F16 has .* bytes instead of"),
        (pickled, "pytorch_model.bin must be converted to safetensors first"),
        (bad_index, "not a safetensors index"),
    ):
        path = shutil.copytree(hf, tmp_path / damage.__name__)
        damage(path)
        with pytest.raises(WeightsError, match=words) as caught:
            open_checkpoint(path)
        assert str(path) in str(caught.value)


def test_an_index_that_promises_what_no_file_holds_is_named(hf: Path) -> None:
    split(hf)
    index = hf / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model.norm.weight"', '"model.other.weight"'))
    with pytest.raises(WeightsError, match=r"index\.json promises model\.other\.weight, which the file does not hold"):
        open_checkpoint(hf)


def test_weights_that_do_not_fit_config_json_are_named(hf: Path, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    cases: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
        (lambda t: t.pop(name), f"{name} missing"),
        (lambda t: t.update({"model.layers.1.extra.weight": torch.ones(1)}), "extra.weight have no place in a 'llama'"),
        (lambda t: t.update({name: torch.ones(12, 15)}), r"k_proj.weight has shape \[12, 15\] where .* \[12, 16\]"),
        (lambda t: t.update({name: t[name].to(torch.int8)}), "k_proj.weight has dtype int8; .* dequantise"),
        (
            lambda t: t.update({name: t[name].bfloat16()}),
            "k_proj.weight torch.bfloat16.*give them one dtype with `conv",
        ),
    ]
    for number, (damage, words) in enumerate(cases):
        path = shutil.copytree(hf, tmp_path / str(number))
        change(path, damage)
        with pytest.raises(WeightsError, match=words):
            to_megatron(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_numbers_that_are_not_finite_end_a_conversion_unless_allowed(hf: Path, tmp_path: Path) -> None:
    for value in (float("nan"), float("inf"), float("-inf")):
        change(hf, lambda tensors, value=value: tensors["model.norm.weight"].__setitem__(3, value))  # type: ignore[misc]
        with pytest.raises(
            WeightsError, match=r"decoder.final_layernorm.weight: NaN or infinity in rows 0 to 16.*--allow"
        ):
            to_megatron(hf, tmp_path / "out")
    plan = actions.cast(open_checkpoint(hf), tmp_path / "cast", torch.bfloat16)
    assert convert(plan, allow_nan=True).not_finite == ["model.norm.weight"]
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_another_size_is_refused(hf: Path, tmp_path: Path) -> None:
    tokenizer = json.loads((hf / "tokenizer.json").read_text())
    (hf / "tokenizer.json").write_text(json.dumps(tokenizer | {"added_tokens": [{"id": 50}]}))
    with pytest.raises(WeightsError, match=r"token ids up to 50, but config.json says vocab_size=50"):
        to_megatron(hf, tmp_path / "out")
    (hf / "tokenizer.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"tokenizer\.json: not a tokenizer"):
        to_megatron(hf, tmp_path / "out")


def test_a_target_that_exists_or_cannot_be_written_is_refused(hf: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(WeightsError, match="there: exists already; give another directory"):
        to_megatron(hf, tmp_path / "there")
    with pytest.raises(WeightsError, match=r"/proc/nowhere: cannot be written .* fix the permissions"):
        to_megatron(hf, Path("/proc/nowhere"))


def test_a_disk_that_is_too_small_is_noticed_before_anything_is_written(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    with pytest.raises(WeightsError, match=r"0\.00 GiB free where 0\.06 GiB are needed; make room"):
        to_megatron(hf, tmp_path / "out")
    assert not list(tmp_path.glob(".converting-out*"))


def test_damaged_megatron_files_are_named(megatron: Path, tmp_path: Path) -> None:
    def missing(folder: Path) -> None:
        (folder / "__0_0.distcp").unlink()

    def truncated(folder: Path) -> None:
        (folder / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes()[:-1])

    def no_metadata(folder: Path) -> None:
        (folder / ".metadata").unlink()

    def hostile(folder: Path) -> None:
        (folder / ".metadata").write_bytes(pickle.dumps(Path.unlink))

    for damage, words in (
        (missing, "__0_0.distcp: file is missing"),
        (truncated, "__0_0.distcp: cut short"),
        (no_metadata, r"\.metadata: cannot be read"),
        (hostile, "it names builtins.getattr|it names pathlib.Path"),
    ):
        path = shutil.copytree(megatron, tmp_path / damage.__name__)
        damage(path / "release")
        with pytest.raises(WeightsError, match=words):
            open_checkpoint(path)


def test_a_chunk_that_is_not_what_the_metadata_says_is_named(megatron: Path) -> None:
    file = megatron / "release" / "__0_0.distcp"
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b"PK\x01\x02", b"PK\x09\x09"))
    source = open_checkpoint(megatron)
    with pytest.raises(WeightsError, match=r"__0_0\.distcp: the chunk at byte \d+ is damaged"):
        compare(source, source, silent)


def test_numbers_that_were_changed_in_a_chunk_end_a_conversion_and_name_it(megatron: Path, tmp_path: Path) -> None:
    tensors = open_checkpoint(megatron).reader.tensors
    for number, name in enumerate(sorted(name for name in tensors if is_weight(name))):
        path = shutil.copytree(megatron, tmp_path / str(number))
        source = open_checkpoint(path)
        chunk = source.reader.tensors[name].chunks[0]
        with open(chunk.place.file, "r+b") as file:
            position = chunk.place.offset + chunk.array(torch.float32).offset + 7
            file.seek(position)
            low = file.read(1)[0]
            file.seek(position)
            file.write(bytes([low ^ 1]))
        message = rf"distcp: the .* numbers of the chunk at byte {chunk.place.offset} have not the checksum"
        with pytest.raises(WeightsError, match=message):
            convert(actions.megatron_to_hf(open_checkpoint(path), tmp_path / "out", None))
        with pytest.raises(WeightsError, match=message):
            convert(actions.reshard(open_checkpoint(path), tmp_path / "out", TargetLayout(2)))
        assert not (tmp_path / "out").exists()


def test_a_chunk_that_was_saved_without_checksums_is_read() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        stream = io.BytesIO()
        torch.save(torch.arange(6.0), stream)
    finally:
        torch.serialization.set_crc32_options(True)
    array = read_array(zipfile.ZipFile(stream))
    assert (array.shape, array.checksum) == ((6,), None)
    assert stream.getvalue()[array.offset :][:24] == torch.arange(6.0).numpy().tobytes()


@given(data=st.binary(min_size=1, max_size=60), seed=st.integers(0, 2**32), cuts=st.sets(st.integers(1, 59)))
def test_the_sum_of_pieces_in_any_order_is_that_of_the_whole(data: bytes, seed: int, cuts: set[int]) -> None:
    bounds = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    pieces = list(itertools.pairwise(bounds))
    random.Random(seed).shuffle(pieces)
    sums = ReadSums()
    found = [sums.add(len(data), begin, memoryview(data)[begin:end]) for begin, end in pieces]
    assert found == [None] * (len(pieces) - 1) + [zlib.crc32(data)]
    assert sums.add(len(data), 0, memoryview(data)[:1]) is None


def test_a_chunk_runs_no_code_and_is_read_only_as_it_lies() -> None:
    def archive(content: object) -> zipfile.ZipFile:
        stream = io.BytesIO()
        torch.save(content, stream)
        return zipfile.ZipFile(stream)

    square = torch.arange(6.0).view(2, 3)
    assert read_array(archive(square)).shape == (2, 3)
    for content, words in (
        (Path("x"), "names pathlib.PosixPath, which no plain tensor needs"),
        (SimpleNamespace(), "names types.SimpleNamespace, which no plain tensor needs"),
        ([square], "something else than a tensor"),
        (square.T, "transposed"),
    ):
        with pytest.raises(UnknownName, match=words):
            read_array(archive(content))


def test_a_megatron_checkpoint_without_a_config_asks_for_one(megatron: Path, hf: Path, tmp_path: Path) -> None:
    shutil.rmtree(megatron / "hf")
    with pytest.raises(WeightsError, match=r"without a config.json beside it; .* with --hf DIR"):
        actions.megatron_to_hf(open_checkpoint(megatron), tmp_path / "out", None)
    convert(actions.megatron_to_hf(open_checkpoint(megatron, hf), tmp_path / "out", None))
    write_config(tmp_path / "other", num_hidden_layers=3)
    with pytest.raises(WeightsError, match=r"has 2 layers where config.json says 3"):
        actions.megatron_to_hf(open_checkpoint(megatron, tmp_path / "other"), tmp_path / "out", None)
    write_config(tmp_path / "tied", tie_word_embeddings=True)
    with pytest.raises(WeightsError, match=r"output_layer.weight have no row in the table of 'llama'"):
        actions.megatron_to_hf(open_checkpoint(megatron, tmp_path / "tied"), tmp_path / "out", None)
    write_config(tmp_path / "biased", model_type="qwen2")
    with pytest.raises(WeightsError, match=r"no self_attention\.linear_qkv\.bias of layer 0"):
        actions.megatron_to_hf(open_checkpoint(megatron, tmp_path / "biased"), tmp_path / "out", None)


def test_a_hugging_face_directory_without_a_config_is_refused_before_anything_is_written(
    hf: Path, tmp_path: Path
) -> None:
    (hf / "config.json").unlink()
    source = open_checkpoint(hf)
    for plan in (
        lambda: actions.cast(source, tmp_path / "out", torch.float16),
        lambda: actions.hf_to_megatron(source, tmp_path / "out", TargetLayout(), None),
    ):
        with pytest.raises(WeightsError, match=r"hf: no config\.json there; copy it from the model"):
            plan()


def test_a_verb_for_the_other_format_says_which_to_use(hf: Path, megatron: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(WeightsError, match="a Megatron checkpoint already; `convert reshard`"):
        actions.hf_to_megatron(open_checkpoint(megatron), out, TargetLayout(), None)
    with pytest.raises(WeightsError, match="a Hugging Face directory already; `convert cast`"):
        actions.megatron_to_hf(open_checkpoint(hf), out, None)
    with pytest.raises(WeightsError, match="has no layout; use `convert hf-to-megatron`"):
        actions.reshard(open_checkpoint(hf), out, TargetLayout())
    with pytest.raises(WeightsError, match="no such directory"):
        open_checkpoint(tmp_path / "nowhere")


def test_a_run_that_is_given_a_megatron_checkpoint_names_the_command(megatron: Path) -> None:
    for path in (megatron, megatron / "release"):
        with pytest.raises(ConfigError, match=rf"run `megatron-rl convert megatron-to-hf {path} OUT` and give OUT"):
            read_hf_config(path)


def test_options_that_do_not_fit_are_refused(hf: Path, tmp_path: Path) -> None:
    source, out = open_checkpoint(hf), tmp_path / "out"
    with pytest.raises(WeightsError, match="--tp 3: does not divide num_attention_heads=4"):
        actions.hf_to_megatron(source, out, TargetLayout(3), None)
    with pytest.raises(WeightsError, match=r"--pp 3: more stages than the model's 2 layers, .* up to 2"):
        actions.hf_to_megatron(source, out, TargetLayout(1, 3), None)
    with pytest.raises(WeightsError, match=r"--pp 2, --vpp 2, .* do not fit 2 layers: .*does not divide the 1 layers"):
        actions.hf_to_megatron(source, out, TargetLayout(1, 2, virtual=2), None)
    for settings, words in (
        ({"virtual": 2}, "--vpp 2: "),
        ({"first": 1}, "--first-stage-layers 1: "),
        ({"first": 1, "last": 1}, "--first-stage-layers 1, --last-stage-layers 1: "),
    ):
        with pytest.raises(WeightsError, match=f"^{words}there is one stage; give --pp 2 or more"):
            actions.hf_to_megatron(source, out, TargetLayout(**settings), None)
    with pytest.raises(WeightsError, match=r"--ep 2, --etp 1: must divide the model's 1 expert\(s\)"):
        actions.hf_to_megatron(source, out, TargetLayout(expert=2), None)
    with pytest.raises(WeightsError, match="at least two checkpoints"):
        actions.average([source], [1.0], out)
    with pytest.raises(WeightsError, match="of a sum that is not 0"):
        actions.average([source, source], [1.0, -1.0], out)
    write_model(tmp_path / "larger", hidden_size=20)
    with pytest.raises(WeightsError, match="these are different models"):
        actions.average([source, open_checkpoint(tmp_path / "larger")], [1.0, 1.0], out)
