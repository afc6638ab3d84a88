"""Putting a whole file in place, locking one, JSON objects; every room may use it. Appending is up to each writer."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

_NO_MORE_BYTES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends: temporary beside it, fsync, rename.

    A reader sees the old file or the new one, never half of one; after an exception the old one stays. `mode` is that
    of a new file, less the umask. Raises OSError as the file system does, with the name of the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


def write_atomic(path: Path, content: bytes | str, mode: int = 0o666) -> Path:
    """Replace `path` by `content` (text as UTF-8) as `atomic_file` does, and return the path."""
    with atomic_file(path, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def regular(path: Path) -> Path:
    """`path`, about to be opened for reading; OSError where a pipe, a socket or a device stands, which might hang."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "not a regular file; put one in its place", str(path))
    return path


def json_object(text: bytes | str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> dict[str, Any]:
    """The JSON object in `text`. `pairs`: as `json.loads`' object_pairs_hook.

    Raises:
        ValueError: it is no JSON, another value than an object, or nested without end.
    """
    try:
        found = json.loads(text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError("nested without end") from error
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def disk_failure(error: BaseException) -> str | None:
    """In words, if `error` says that the file system takes no more bytes; else None."""
    if not isinstance(error, OSError) or error.errno not in _NO_MORE_BYTES:
        return None
    return f"{error}: make room there, or raise the quota, then go on with --resume"


def sync(path: Path) -> None:
    """Make a file's content, or the entries of a directory, durable."""
    descriptor = os.open(regular(path), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(handle: IO[Any] | int) -> bool:
    """Take the file for this process alone until it is closed; False when another process has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
