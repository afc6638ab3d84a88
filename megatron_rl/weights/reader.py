"""Reads slices of tensors out of a directory of safetensors files; what the names mean is not known here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_rl.weights import WeightsError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class TensorOnDisk:
    """One tensor of a file; reads only the rows or columns that are asked for."""

    name: str
    _slice: Any

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._slice.get_shape())

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows `begin` to `end` of the first dimension, in the file's dtype."""
        return self._slice[begin:end]

    def columns(self, begin: int, end: int) -> Tensor:
        """Columns `begin` to `end` of the second dimension, in the file's dtype."""
        return self._slice[:, begin:end]


class SafetensorsReader:
    """All tensors of a Hugging Face directory, one file or many with an index.

    Every file is opened at once (a header each), so that a missing or truncated one is reported on every rank and
    before any rank waits for another.

    Raises:
        WeightsError: no safetensors, a file of the index is missing or cut short, or the index does not fit the files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._tensors: dict[str, TensorOnDisk] = {}
        for file, names in self._files().items():
            handle = self._open(file)
            stored = set(handle.keys())
            if absent := (names or set()) - stored:
                raise WeightsError(
                    f"{self.path / file}: {INDEX} promises {some_names(absent)}, which the file does not hold; "
                    "copy both again from the same model"
                )
            for name in names or stored:
                self._tensors[name] = TensorOnDisk(name, handle.get_slice(name))

    @property
    def names(self) -> set[str]:
        """Every tensor's name."""
        return set(self._tensors)

    def __getitem__(self, name: str) -> TensorOnDisk:
        """The tensor `name`.

        Raises:
            WeightsError: there is none.
        """
        if name not in self._tensors:
            raise WeightsError(f"{self.path}: no tensor {name!r} in the safetensors files; copy the model again")
        return self._tensors[name]

    def _files(self) -> dict[str, set[str] | None]:
        """File name -> the tensors that the index places there (None: whatever it holds)."""
        index = self.path / INDEX
        if not index.is_file():
            return {SINGLE: None}
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError) as error:
            raise WeightsError(f"{index}: not a safetensors index ({error}); copy the file again") from error
        files: dict[str, set[str] | None] = {file: set() for file in sorted(set(weight_map.values()))}
        for name, file in weight_map.items():
            files[file].add(name)  # type: ignore[union-attr]
        return files

    def _open(self, file: str) -> Any:
        path = self.path / file
        if not path.is_file():
            others = sorted(p.name for p in self.path.glob("*") if p.suffix in {".bin", ".pt", ".pth", ".gguf"})
            hint = f"; {', '.join(others)} must be converted to safetensors first" if others else ""
            raise WeightsError(f"{path}: file is missing; copy it again from the model{hint}")
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise WeightsError(
                f"{path}: unreadable or cut short ({path.stat().st_size} bytes: {error}); copy the file again"
            ) from error


def some_names(names: set[str], shown: int = 5) -> str:
    """A list of names for a message, shortened."""
    listed = sorted(names)
    return ", ".join(listed[:shown]) + (f" and {len(listed) - shown} more" if len(listed) > shown else "")
