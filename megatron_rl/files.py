"""Putting a whole file in place; every room may use it, and it knows none of them. Appending is up to each writer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends: temporary beside it, fsync, rename.

    A reader sees the old file or the new one, never half of one; after an exception the old one stays. `mode` is that
    of a new file, less the umask. Raises OSError as the file system does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, content: bytes | str, mode: int = 0o666) -> Path:
    """Replace `path` by `content` (text as UTF-8) as `atomic_file` does, and return the path."""
    with atomic_file(path, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def sync(path: Path) -> None:
    """Make a file's content, or the entries of a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
