"""`megatron-rl convert ...` as it is typed: what it prints, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from megatron_rl.cli import app, main
from megatron_rl.cli_convert import _bytes
from megatron_rl.cluster.started import LAUNCH
from megatron_rl.config import ConfigError
from megatron_rl.verify import read_texts
from megatron_rl.weights import WeightsError
from tests.convert_models import contents, write_config, write_model


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, words)])


def test_there_and_back_on_the_command_line(tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "hf")
    there = run("hf-to-megatron", tmp_path / "hf", tmp_path / "m", "--tp", 2, "--make-vocab-size-divisible-by", 8)
    assert there.exit_code == 0, there.output
    assert "bytes of tensors in 1 files" in there.stdout
    back = run("megatron-to-hf", tmp_path / "m", tmp_path / "back", "--shard-size", "4kB", "--max-memory", "300MiB")
    assert back.exit_code == 0, back.output
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 1
    equal = run("diff", tmp_path / "m", tmp_path / "back")
    assert equal.exit_code == 0
    assert f"{len(tensors)} tensors compared: 0 differ" in equal.stdout
    listed = run("inspect", tmp_path / "m")
    assert "decoder.layers.self_attention.linear_qkv.weight" in listed.stdout
    assert "embedding.word_embeddings.weight" in listed.stdout
    assert "[64, 16]" in listed.stdout


@pytest.mark.parametrize("name", ["[bold]z", "runs[/v2]"])
def test_names_are_printed_as_they_are(tmp_path: Path, name: str) -> None:
    write_model(tmp_path / "hf")
    target = tmp_path / name
    target.parent.mkdir(exist_ok=True)
    done = run("cast", tmp_path / "hf", target, "--dtype", "bfloat16")
    assert done.exit_code == 0, done.output
    assert name in done.stdout


def test_other_verbs_on_the_command_line(tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "hf")
    assert run("cast", tmp_path / "hf", tmp_path / "half", "--dtype", "bfloat16").exit_code == 0
    assert run("average", tmp_path / "hf", tmp_path / "hf", "--out", tmp_path / "mean").exit_code == 0
    for name, tensor in load_file(tmp_path / "mean" / "model.safetensors").items():
        assert torch.equal(tensor, tensors[name])
    assert run("hf-to-megatron", tmp_path / "half", tmp_path / "m").exit_code == 0
    assert run("cast", tmp_path / "m", tmp_path / "wide", "--dtype", "float32").exit_code == 0
    assert run("reshard", tmp_path / "m", tmp_path / "m2", "--tp", 2).exit_code == 0
    for path in ("hf/config.json", "hf/tokenizer.json", "latest_checkpointed_iteration.txt", "release/common.pt"):
        assert (tmp_path / "m2" / path).read_bytes() == (tmp_path / "m" / path).read_bytes()
    assert run("diff", tmp_path / "m", tmp_path / "m2").exit_code == 0
    assert run("diff", tmp_path / "half", tmp_path / "wide").exit_code == 0
    differs = run("diff", tmp_path / "half", tmp_path / "hf", "--limit", 3)
    assert differs.exit_code == 1
    assert "bfloat16 / float32" in differs.stdout
    assert f"{len(tensors)} tensors compared: {len(tensors)} differ" in differs.stdout


def test_a_dry_run_prints_files_and_bytes_and_writes_nothing(tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "hf")
    before = contents(tmp_path)
    shown = run("cast", tmp_path / "hf", tmp_path / "out", "--dtype", "bfloat16", "--dry-run")
    assert shown.exit_code == 0
    assert f"model.safetensors  {len(tensors)} tensors" in shown.stdout
    size = sum(tensor.numel() for tensor in tensors.values()) * 2
    assert f"dry run: {size:,} bytes of tensors would be written to" in shown.stdout
    assert contents(tmp_path) == before


def test_a_dry_run_without_weights_needs_no_speed_and_says_why_it_knows_no_time(tmp_path: Path) -> None:
    write_config(tmp_path / "hf")
    shown = run("hf-to-megatron", tmp_path / "hf", tmp_path / "out", "--dry-run", "--ranks", 2)
    assert shown.exit_code == 0, shown.output
    assert "time: not known, since without the weights nothing can be tried; give a speed with --gb-per-s" in (
        shown.stdout
    )
    assert "each asks rank 0 four times" in shown.stdout
    given = run("hf-to-megatron", tmp_path / "hf", tmp_path / "out", "--dry-run", "--gb-per-s", 1)
    assert "at 1.00 GB/s a rank, as given" in given.stdout
    assert "asks rank 0" not in given.stdout


def test_a_target_that_exists_is_refused_before_a_source_is_looked_at(tmp_path: Path) -> None:
    verbs: list[tuple[object, ...]] = [
        (verb, tmp_path / "nowhere", tmp_path) for verb in ("hf-to-megatron", "megatron-to-hf", "reshard")
    ]
    verbs += [("cast", tmp_path / "nowhere", tmp_path, "--dtype", "bf16"), ("average", "a", "b", "--out", tmp_path)]
    for words in verbs:
        refused = run(*words)
        assert refused.exit_code == 1
        assert str(refused.exception) == f"{tmp_path}: exists already; give another directory, or move it away"


def test_the_limit_holds_for_names_that_one_side_alone_has(tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "two")
    write_model(tmp_path / "one", num_hidden_layers=1)
    only = len(tensors) - len(load_file(tmp_path / "one" / "model.safetensors"))
    shown = run("diff", tmp_path / "two", tmp_path / "one", "--limit", 3).stdout
    assert shown.count(f"only in {tmp_path / 'two'}: model.layers.1.") == 3
    assert f"... and {only - 3} more only in {tmp_path / 'two'}\n" in shown


def test_tensors_that_are_not_finite_are_listed(tmp_path: Path) -> None:
    write_model(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    refused = run("cast", tmp_path / "hf", tmp_path / "out", "--dtype", "bfloat16")
    assert isinstance(refused.exception, WeightsError)
    listed = run("cast", tmp_path / "hf", tmp_path / "out", "--dtype", "bfloat16", "--allow-nan")
    assert "not finite: model.norm.weight" in listed.stdout


def test_a_failure_is_one_message_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("inspect", "verify"):
        monkeypatch.setattr("sys.argv", ["megatron-rl", "convert", verb, str(tmp_path / "nowhere")])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 1
        assert capsys.readouterr().err.startswith(
            f"error: {tmp_path / 'nowhere'}: no such directory; give a Hugging Face"
        )


def test_a_rank_that_fails_leaves_its_part_of_the_target_but_not_the_file_by_which_it_was_met(tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "hf")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", LAUNCH: "once"}
    command = ["convert", "cast", str(tmp_path / "hf"), str(tmp_path / "out"), "--dtype", "bf16"]
    with pytest.raises(WeightsError, match="NaN or infinity"):
        CliRunner().invoke(app, command, env=rank, catch_exceptions=False)
    assert [path.name for path in tmp_path.glob(".*")] == [".converting-out"]


def test_a_megatron_checkpoint_is_verified_against_a_directory_that_is_named(tmp_path: Path) -> None:
    write_model(tmp_path / "hf")
    run("hf-to-megatron", tmp_path / "hf", tmp_path / "megatron")
    refused = run("verify", tmp_path / "megatron")
    assert isinstance(refused.exception, WeightsError)
    assert "which transformers cannot read; name the Hugging Face directory" in str(refused.exception)


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("same", {}, "no tokenizer that transformers reads"),
        ("other", {"num_hidden_layers": 3}, "holds another model than"),
        ("bare", None, "bare: no config.json there; copy it from the model"),
    ],
)
def test_a_directory_that_cannot_be_compared_with_is_refused_before_a_model_is_built(
    tmp_path: Path, name: str, settings: dict[str, int] | None, told: str
) -> None:
    write_model(tmp_path / "hf")
    assert run("hf-to-megatron", tmp_path / "hf", tmp_path / "megatron").exit_code == 0
    write_model(tmp_path / name, **(settings or {}))
    (tmp_path / name / "tokenizer.json").unlink()
    if settings is None:
        (tmp_path / name / "config.json").unlink()
    refused = run("verify", tmp_path / "megatron", "--hf", tmp_path / name)
    assert isinstance(refused.exception, WeightsError), refused.output
    assert told in str(refused.exception)


@pytest.mark.parametrize("verb", [["convert", "inspect"], ["report"], ["worst"], ["ledger"]])
def test_a_name_that_no_file_system_takes_is_one_message(
    verb: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["megatron-rl", *verb, "x" * 300])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code in (1, 2)
    assert "File name too long" in capsys.readouterr().err


def test_what_does_not_fit_on_the_disk_is_said_before_a_dry_run_plans_it(tmp_path: Path) -> None:
    write_model(tmp_path / "hf")
    large = ("--make-vocab-size-divisible-by", 10**12, "--dry-run")
    refused = run("hf-to-megatron", tmp_path / "hf", tmp_path / "out", *large)
    assert "GiB free where" in str(refused.exception)
    assert refused.stdout == ""


def test_sizes_are_read_with_their_units() -> None:
    assert [_bytes(text, "x") for text in ("7", "2kB", "1.5MiB", "8GiB", "5GB", "1 T")] == [
        7,
        2000,
        3 * 2**19,
        2**33,
        5 * 10**9,
        10**12,
    ]
    with pytest.raises(ConfigError, match="--max-memory=much: not a size; write 512MiB"):
        _bytes("much", "--max-memory")
    with pytest.raises(ConfigError, match="9: not a size"):
        _bytes("9" * 400, "--max-memory")


def test_less_memory_than_blocks_need_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "hf")
    refused = run("cast", tmp_path / "hf", tmp_path / "out", "--dtype", "bf16", "--max-memory", "1MiB")
    assert str(refused.exception) == "--max-memory=1MiB: at least 128 MiB are needed"


def test_texts_to_verify_with_are_the_lines_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("one\n\ntwo words\n")
    assert read_texts(tmp_path / "texts") == ["one", "two words"]
    (tmp_path / "texts").write_text("\n")
    with pytest.raises(WeightsError, match="holds no text; give one a line"):
        read_texts(tmp_path / "texts")
    with pytest.raises(WeightsError, match="cannot be read"):
        read_texts(tmp_path / "nothing")
