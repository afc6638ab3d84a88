"""Content hashes of checkpoint files; which files make a checkpoint, and what a wrong one means, is not known here.

xxh3_128 answers "did a byte change?" at about the speed of memory, many times faster than blake2b or sha256, so that it
costs little beside the disk even for hundreds of GB. It keeps out accidents, not forgers: whoever can change the files
can change the manifest as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO

import xxhash

CHUNK = 8 * 2**20
"""Bytes read at a time."""


def digest_of(data: bytes) -> str:
    """xxh3_128 of `data`, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of_file(path: Path) -> str:
    """xxh3_128 of the file's content, hexadecimal. Raises OSError."""
    state, buffer = xxhash.xxh3_128(), bytearray(CHUNK)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(memoryview(buffer)[:count])
    return state.hexdigest()


class HashingStream:
    """A file that is written from its beginning to its end, and the hash of what was given to it.

    The hash is of the bytes in memory: what goes wrong on their way to the disk is found as well.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._state = file, xxhash.xxh3_128()

    def write(self, data: bytes | memoryview) -> int:
        self._state.update(data)
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()

    def flush(self) -> None:
        self._file.flush()

    def tell(self) -> int:
        return self._file.tell()

    def fileno(self) -> int:
        return self._file.fileno()

    def hexdigest(self) -> str:
        """Of everything written so far."""
        return self._state.hexdigest()
