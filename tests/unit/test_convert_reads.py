"""How many requests reading takes: an archive's directory two, a run of small reads one question to the kernel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatron_rl.weights.convert.torch_dist import Chunk, Place
from megatron_rl.weights.safetensors_file import READ_AHEAD, read_elements


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the kernel was asked to read ahead."""
    found: list[int] = []
    original = os.posix_fadvise

    def counting(descriptor: int, offset: int, length: int, advice: int) -> None:
        found.append(offset)
        original(descriptor, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", counting)
    return found


def test_small_reads_ask_for_what_follows_once_in_a_while(tmp_path: Path, asked: list[int]) -> None:
    file, step = tmp_path / "numbers", READ_AHEAD // 8
    with open(file, "wb") as stream:
        stream.truncate(4 * READ_AHEAD)
    for number in range(16):
        read_elements(file, 0, number * step, 100, torch.uint8)
    assert asked == [100, 100 + 5 * step, 100 + 10 * step, 100 + 15 * step]
    read_elements(file, 0, 0, 100, torch.uint8)  # back again
    assert asked[-1] == 100


def test_the_directory_of_a_chunk_takes_two_reads(
    tmp_path: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, data = tmp_path / "chunk", torch.arange(100_000.0)
    torch.save(data, file)
    reads: list[int] = []
    original = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(len(buffers[0]))
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    found = Chunk((0,), (100_000,), Place(file, 0, file.stat().st_size)).array(torch.float32)
    assert len(reads) == 2
    assert sum(reads) < 10_000
    assert not asked
    assert torch.equal(read_elements(file, found.offset, 0, 100_000, torch.float32), data)
