"""A conversion that is killed, by a real SIGKILL, goes on to the same bytes; a full disk; the memory it takes."""

from __future__ import annotations

import math
import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_rl.config import read_hf_config
from megatron_rl.weights import WeightsError
from megatron_rl.weights.convert import actions, job, journal, one_file, torch_dist
from megatron_rl.weights.convert.actions import Conversion
from megatron_rl.weights.convert.cuts import TargetLayout
from megatron_rl.weights.convert.opened import open_checkpoint
from megatron_rl.weights.convert.tensors import size_of
from megatron_rl.weights.families import family_of
from megatron_rl.weights.safetensors_file import header_of
from tests.convert_models import contents, convert, record_reads, write_config, write_model

Make = Callable[[Path, Path], Conversion]
TOOLS: dict[str, Make] = {
    "hf-to-megatron": lambda inputs, out: actions.hf_to_megatron(
        open_checkpoint(inputs / "hf"), out, TargetLayout(2, 2), None
    ),
    "megatron-to-hf": lambda inputs, out: actions.megatron_to_hf(open_checkpoint(inputs / "megatron"), out, None, 4000),
    "cast": lambda inputs, out: actions.cast(open_checkpoint(inputs / "hf"), out, torch.float16, 4000),
    "average": lambda inputs, out: actions.average(
        [open_checkpoint(inputs / "hf"), open_checkpoint(inputs / "megatron")], [1, 3], out, 4000
    ),
    "reshard": lambda inputs, out: actions.reshard(open_checkpoint(inputs / "megatron"), out, TargetLayout(1, 2)),
}


EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


def with_experts(tool: str, inputs: Path, out: Path) -> Conversion:
    """As TOOLS, of a Qwen3-MoE."""
    if tool == "hf-to-megatron":
        layout = TargetLayout(2, 2, expert=2)
        return actions.hf_to_megatron(open_checkpoint(inputs / "moe-hf"), out, layout, None)
    return actions.megatron_to_hf(open_checkpoint(inputs / "moe-megatron"), out, None, 4000)


TOOLS |= {f"{tool} with experts": partial(with_experts, tool) for tool in ("hf-to-megatron", "megatron-to-hf")}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_model(folder / "hf")
    write_model(folder / "moe-hf", **EXPERTS)
    for name in ("", "moe-"):
        source = open_checkpoint(folder / f"{name}hf")
        convert(actions.hf_to_megatron(source, folder / f"{name}megatron", TargetLayout(2, 2), None))
    return folder


def in_a_child(function: Callable[[], object]) -> int:
    """Run `function` in a fork of this process; returns how it ended, as `os.waitstatus_to_exitcode`."""
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_when(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, calls: int) -> None:
    """Let the process kill itself at call number `calls` of a function, before it does anything."""
    original, count = getattr(owner, name), [0]

    def wrapper(*args: object, **kwargs: object) -> object:
        count[0] += 1
        if count[0] == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapper)


# In the middle of the second file; before the second file has its name; when it has, but the journal (written once at
# the beginning) does not know it; before the whole directory has its name.
MOMENTS = {
    "writing": (one_file, "is_finite", 17),
    "finished": (one_file.os, "fsync", 4),
    "unrecorded": (journal.Journal, "_save", 3),
    "complete": (job, "_complete", 1),
}


def convert_until(moment: str, plan: Conversion, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a child, which kills itself then."""
    with monkeypatch.context() as patch:
        die_when(patch, *MOMENTS[moment])
        assert in_a_child(lambda: convert(plan)) == -signal.SIGKILL


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_killed_conversion_goes_on_to_the_same_bytes(
    tool: str, moment: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_until(moment, TOOLS[tool](inputs, tmp_path / "out"), monkeypatch)
    assert [path.name for path in tmp_path.iterdir()] == [".converting-out"]
    outcome = convert(TOOLS[tool](inputs, tmp_path / "out"))
    assert outcome.kept > 0
    convert(TOOLS[tool](inputs, tmp_path / "whole"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_a_finished_file_that_was_changed_meanwhile_is_written_again(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_until("complete", TOOLS["cast"](inputs, tmp_path / "out"), monkeypatch)
    first = sorted((tmp_path / ".converting-out").glob("*.safetensors"))[0]
    damaged = bytearray(first.read_bytes())
    damaged[-1] ^= 1
    first.write_bytes(damaged)
    convert(TOOLS["cast"](inputs, tmp_path / "out"))
    convert(TOOLS["cast"](inputs, tmp_path / "whole"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_what_another_conversion_left_is_not_taken_over(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_until("complete", TOOLS["average"](inputs, tmp_path / "out"), monkeypatch)
    assert convert(TOOLS["cast"](inputs, tmp_path / "out")).kept == 0
    convert(TOOLS["cast"](inputs, tmp_path / "whole"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_two_processes_do_not_write_one_target(inputs: Path, tmp_path: Path) -> None:
    with (
        job._alone(tmp_path / ".converting-out", tmp_path / "out", 0),
        pytest.raises(WeightsError, match="another process is writing it"),
    ):
        convert(TOOLS["cast"](inputs, tmp_path / "out"))


def sparse_model(path: Path) -> int:
    """A model of 380 MiB in one file that takes no room on disk, and one tensor of 256 MiB; returns the bytes."""
    hf = write_config(
        path,
        vocab_size=65536,
        hidden_size=1024,
        num_hidden_layers=1,
        intermediate_size=8192,
        head_dim=128,
        tie_word_embeddings=True,
        tokenizer=None,
    )
    (path / "tokenizer.json").unlink()
    shapes = family_of(hf).hf_shapes(hf)
    header = header_of([(name, shape, torch.float32) for name, shape in shapes.items()])
    size = sum(torch.Size(shape).numel() for shape in shapes.values()) * 4
    with open(path / "model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    return size


def test_memory_stays_below_the_limit_whatever_the_model_size(tmp_path: Path) -> None:
    size = sparse_model(tmp_path / "hf")
    plan = actions.hf_to_megatron(open_checkpoint(tmp_path / "hf"), tmp_path / "out", TargetLayout(2), torch.bfloat16)
    assert size > 2 * job.LEAST_MEMORY
    assert max(size_of(tensor) for file in plan.target.files for tensor in file.tensors) >= job.LEAST_MEMORY / 2

    def limited() -> None:
        # Of memory that is this process's own: what it maps of libraries and the page cache depends on others.
        limit = private_bytes() + job.LEAST_MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(2 * job.LEAST_MEMORY, dtype=torch.uint8)
        convert(plan)

    in_a_child(limited)
    assert (tmp_path / "out").is_dir()


def private_bytes() -> int:
    """Memory that belongs to this process alone, resident or not."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def test_a_full_disk_is_one_message_and_the_same_command_goes_on(inputs: Path, tmp_path: Path) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            convert(TOOLS["cast"](inputs, tmp_path / "out"))
        except WeightsError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            (tmp_path / "message").write_text(str(error))

    in_a_child(limited)
    message = (tmp_path / "message").read_text()
    assert "File too large" in message
    assert "make room or fix the permissions, then give the same command again" in message
    convert(TOOLS["cast"](inputs, tmp_path / "out"))
    assert not (tmp_path / ".converting-out").exists()


def test_progress_counts_every_byte_once_also_when_resuming(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_until("unrecorded", TOOLS["cast"](inputs, tmp_path / "out"), monkeypatch)
    plan, told = TOOLS["cast"](inputs, tmp_path / "out"), list[int]()
    plan.run(told.append)
    assert sum(told) == plan.size


@pytest.mark.parametrize("tool", ["hf-to-megatron", "megatron-to-hf", "cast"])
def test_every_number_of_the_source_is_read_once(
    tool: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, reads = TOOLS[tool](inputs, tmp_path / "out"), record_reads(monkeypatch)
    convert(plan)
    hf = read_hf_config(inputs / "hf")
    if tool == "megatron-to-hf":  # the rows that the vocabulary was filled up with are read for their checksum
        stored = open_checkpoint(inputs / "megatron").reader.tensors
        numbers = sum(math.prod(tensor.shape) for name, tensor in stored.items() if torch_dist.is_weight(name))
    else:
        numbers = sum(math.prod(shape) for shape in family_of(hf).hf_shapes(hf).values())
    assert sum(reads) == 4 * numbers
