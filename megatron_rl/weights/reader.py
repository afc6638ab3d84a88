"""A directory of safetensors files: how it is laid out, and how slices are read; what names mean is not known here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_rl.files import json_object
from megatron_rl.weights import WeightsError
from megatron_rl.weights.safetensors_file import TensorOnDisk, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_OPENERS = 16
"""Files looked at once: on a shared file system a header costs waiting, of which a model may have a thousand."""


class SafetensorsReader:
    """All tensors of a Hugging Face directory, one file or many with an index.

    Every file's header is read at once, so that a missing or truncated one is reported on every rank and before any
    rank waits for another. Files may be symbolic links, as in the cache of `huggingface_hub`.

    Raises:
        WeightsError: no safetensors, a file of the index is missing or cut short, the index does not fit the files, or
            a tensor is in two files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files: list[Path] = []
        self._tensors: dict[str, TensorOnDisk] = {}
        listed = self._files()
        with ThreadPoolExecutor(_OPENERS) as threads:
            opened = list(threads.map(self._open, listed))
        for (file, names), stored in zip(listed.items(), opened, strict=True):
            if absent := (names or set()) - stored.keys():
                raise WeightsError(
                    f"{self.path / file}: {INDEX} promises {some_names(absent)}, which the file does not hold; "
                    "copy both again from the same model"
                )
            # What a file holds beyond the index counts as well: a tensor in two files must not depend on their order.
            for name in stored:
                if name in self._tensors:
                    raise WeightsError(
                        f"{self.path / file}: the tensor {name!r} is in {self._tensors[name].file.name} as well; "
                        "the directory mixes two models, copy it again"
                    )
            self._tensors |= stored
            self.files.append(self.path / file)

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
            weight_map: dict[str, str] = json_object(index.read_bytes())["weight_map"]
            found: dict[str, set[str]] = {file: set() for file in sorted(set(weight_map.values()))}
            for name, file in weight_map.items():
                if not isinstance(file, str):
                    raise ValueError(f"{name} is said to be in {file}")
                found[file].add(name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{index}: not a safetensors index ({error}); copy the file again") from error
        return dict(found)

    def _open(self, file: str) -> dict[str, TensorOnDisk]:
        path = self.path / file
        try:
            is_there = path.is_file()
        except OSError as error:
            raise WeightsError(f"{self.path}: {INDEX} names a file {file[:80]!r} ({error.strerror})") from error
        if not is_there:
            others = sorted(p.name for p in self.path.glob("*") if p.suffix in {".bin", ".pt", ".pth", ".gguf"})
            hint = f"; {', '.join(others)} must be converted to safetensors first" if others else ""
            raise WeightsError(f"{path}: file is missing; copy it again from the model{hint}")
        try:
            return read_header(path)
        except OSError as error:
            raise WeightsError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error


def file_name(number: int, count: int) -> str:
    """Of file `number`, from 1, of `count`."""
    return SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def index_of(where: Mapping[str, str], size: int) -> str:
    """The index, as text: `where` is the file of each tensor, `size` the bytes of all."""
    return json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}, indent=2)


def some_names(names: set[str], shown: int = 5) -> str:
    """A list of names for a message, shortened."""
    listed = sorted(names)
    return ", ".join(listed[:shown]) + (f" and {len(listed) - shown} more" if len(listed) > shown else "")
