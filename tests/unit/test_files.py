"""Whole files or none, and what a file system that takes no more says."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_rl.bring_up import in_words
from megatron_rl.files import disk_failure, write_atomic


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """A limit of this process plays the full disk, for those who may not mount a small one."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_for_which_there_is_no_room_keeps_its_old_content_and_is_named(tmp_path: Path) -> None:
    path = write_atomic(tmp_path / "file", "old")
    with files_up_to(1000), pytest.raises(OSError) as caught:
        write_atomic(path, b"x" * 2000)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]
    for told in (disk_failure(caught.value), in_words(caught.value)):
        assert told is not None
        assert f"File too large: '{path}': make room there, or raise the quota" in told


def test_other_errors_are_no_matter_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        (tmp_path / "nothing").read_text()
    assert disk_failure(caught.value) is None
    assert in_words(ZeroDivisionError()) is None
