"""Reading a JSONL prompt file: each line checked once, then read from disk when used; the order of use is `cursor.py`.

What stays in memory is 16 bytes a record (offset, length, line number), not the text.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from .records import DataError, PromptRecord, parse_line


class PromptDataset(Sequence[PromptRecord]):
    """The records of one file, in file order; make one with `PromptDataset.load`.

    `fingerprint` is a hash of the file's content and of the selection made from it: a checkpoint keeps it, so that a
    resumed run notices that its prompts are others. Reading is safe from several threads.
    """

    def __init__(self, path: Path, file: IO[bytes], index: _Index, fingerprint: str) -> None:
        self.path = path
        self.fingerprint = fingerprint
        # Kept open: a file that is replaced during the run (os.replace) does not change what this run reads.
        self._file = file
        self._index = index

    @classmethod
    def load(cls, path: str | Path, *, require: Sequence[str] = (), max_prompts: int | None = None) -> PromptDataset:
        """Check every line of `path` and index it.

        `require` names keys that every record must have (`("answer",)`, `("target",)`). `max_prompts` uses only the
        first so many records. Blank lines are skipped; a record without an id gets `<file stem>:<line>`.
        Raises `DataError` for a missing or empty file, a bad line, and an id that stands twice.
        """
        path = Path(path)
        try:
            file = path.open("rb")
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); give the path of a .jsonl file") from None
        try:
            index, fingerprint = _scan(file, path, require, max_prompts)
        except BaseException:
            file.close()
            raise
        return cls(path, file, index, fingerprint)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, position: int) -> PromptRecord:  # type: ignore[override]  # no slices: they would copy
        if not -len(self) <= position < len(self):
            raise IndexError(f"record {position} of {self.path}, which has {len(self)}")
        offset, length, line = self._index[position % len(self)]
        return _parse(os.pread(self._file.fileno(), length, offset), self.path, line)

    def where(self, position: int) -> str:
        """`file:line` of a record, for messages."""
        return f"{self.path}:{self._index[position][2]}"

    def subset(self, positions: Sequence[int]) -> PromptDataset:
        """The records at `positions`, in that order, as a dataset with its own fingerprint."""
        index = _Index()
        for position in positions:
            index.append(*self._index[position])
        chosen = hashlib.blake2b(self.fingerprint.encode(), digest_size=16)
        chosen.update(array("Q", positions).tobytes())
        return PromptDataset(self.path, os.fdopen(os.dup(self._file.fileno()), "rb"), index, chosen.hexdigest())


class _Index:
    """Offset, length and line number of each record, as flat arrays."""

    def __init__(self) -> None:
        self._offsets = array("Q")
        self._lengths = array("I")
        self._lines = array("I")

    def append(self, offset: int, length: int, line: int) -> None:
        self._offsets.append(offset)
        self._lengths.append(length)
        self._lines.append(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, position: int) -> tuple[int, int, int]:
        return self._offsets[position], self._lengths[position], self._lines[position]


def _scan(file: IO[bytes], path: Path, require: Sequence[str], max_prompts: int | None) -> tuple[_Index, str]:
    index, content = _Index(), hashlib.blake2b(digest_size=16)
    line_of: dict[bytes, int] = {}  # by 16 bytes of hash instead of the id's text
    for offset, line_number, line in _lines(file):
        content.update(line)
        record = _parse(line, path, line_number)
        where = f"{path}:{line_number}"
        missing = [key for key in require if getattr(record, key) is None]
        if missing:
            raise DataError(f'{where}: key "{missing[0]}" is missing; every record needs it here')
        first = line_of.setdefault(hashlib.blake2b(record.id.encode(), digest_size=16).digest(), line_number)
        if first != line_number:
            raise DataError(f"{where}: id {record.id!r} stands in line {first} already; ids must be unique")
        index.append(offset, len(line), line_number)
        if len(index) == max_prompts:
            break
    if not len(index):
        raise DataError(f'{path}: holds no record; every line must be an object such as {{"prompt": "..."}}')
    return index, content.hexdigest()


def _lines(file: IO[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Offset, number (from 1) and bytes of every line that is not blank."""
    offset = 0
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield offset, number, line
        offset += len(line)


def _parse(line: bytes, path: Path, number: int) -> PromptRecord:
    return parse_line(line, f"{path}:{number}", default_id=f"{path.stem}:{number}", default_source=path.stem)
