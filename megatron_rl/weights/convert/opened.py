"""Opens a checkpoint of either format and says what it is; nothing is read but headers and metadata."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import HfConfig, changed_shape, read_hf_config
from megatron_rl.files import json_object
from megatron_rl.weights import WeightsError
from megatron_rl.weights.companions import CONFIG, check_tokenizer
from megatron_rl.weights.convert.tensors import Rows, cast_rows
from megatron_rl.weights.convert.torch_dist import HF, METADATA, TorchDistReader, find_torch_dist
from megatron_rl.weights.convert.views import as_hf, check_hf, check_tied
from megatron_rl.weights.families import family_of
from megatron_rl.weights.fp8 import SUFFIX, Dequantised, names_in_blocks
from megatron_rl.weights.reader import SafetensorsReader
from megatron_rl.weights.safetensors_file import FLOATS


@dataclass(frozen=True)
class Opened:
    """A checkpoint.

    Attributes:
        path: as it was given.
        reader: of its format.
        companions: directory of config.json and the tokenizer; None when there is none (yet).
    """

    path: Path
    reader: SafetensorsReader | TorchDistReader | AbsentReader
    companions: Path | None

    @property
    def is_hf(self) -> bool:
        """Whether this is a Hugging Face directory."""
        return not isinstance(self.reader, TorchDistReader)

    @property
    def identity(self) -> list[Any]:
        """Name, size and time of every file that says what the tensors are, by which a change is noticed."""
        files = list(self.reader.files)
        if isinstance(self.reader, TorchDistReader):
            files.append(self.reader.path / METADATA)
        if files and self.companions is not None:
            files.append(self.companions / CONFIG)
        facts = [(file, file.stat()) for file in files]
        return [[str(file.absolute()), stat.st_size, stat.st_mtime_ns] for file, stat in facts]

    def beside(self) -> Path:
        """`companions`. Raises WeightsError where there are none; the message says how to give them."""
        if self.companions is not None:
            return self.companions
        if self.is_hf:
            raise WeightsError(f"{self.path}: no config.json there; copy it from the model")
        raise WeightsError(
            f"{self.path}: a Megatron checkpoint without a config.json beside it; give the Hugging Face directory of "
            "the model that it was trained from with --hf DIR"
        )

    def hf(self) -> HfConfig:
        """What config.json says. Raises as `beside`, and ConfigError where it describes a model not supported."""
        return read_hf_config(self.beside())

    @property
    def in_blocks(self) -> set[str]:
        """Names of a Hugging Face directory's matrices that are stored in blocks of fp8."""
        return set() if isinstance(self.reader, TorchDistReader) else names_in_blocks(self.reader.names)

    def plain(self, dtype: torch.dtype | None = None) -> dict[str, Rows]:
        """A Hugging Face directory's tensors by name, without blocks of fp8: those as numbers of `dtype`.

        None: the dtype that config.json names, in which the model computes.
        """
        assert not isinstance(self.reader, TorchDistReader)
        tensors: dict[str, Rows] = {name: self.reader[name] for name in sorted(self.reader.names)}
        if isinstance(self.reader, SafetensorsReader):
            for name in self.in_blocks:
                found = Dequantised(self.reader[name], self.reader[name + SUFFIX])
                tensors[name] = cast_rows(found, dtype or computes_in(self.beside()))
                del tensors[name + SUFFIX]
        return tensors

    def left_out(self) -> list[str]:
        """Tensors of a Hugging Face directory that a Megatron checkpoint has no place for, such as another head's.

        Where the weights are not there: what config.json says of such layers, whose tensors it does not name.
        """
        if isinstance(self.reader, TorchDistReader):
            return []
        hf = self.hf()
        if isinstance(self.reader, AbsentReader) and (further := hf.num_predicted_layers):
            return [f"model.layers.{hf.num_layers + number}.*" for number in range(further)]
        return sorted(self.reader.names - family_of(hf).hf_shapes(hf).keys() - family_of(hf).tied_names())

    def as_hf(self, dtype: torch.dtype | None = None) -> dict[str, Rows]:
        """The model's tensors by Hugging Face name, in the order of the network, after a check of names and shapes.

        Args:
            dtype: of those that are stored as blocks of fp8, as in `plain`.

        Raises:
            WeightsError: they are not those of the model that config.json describes.
        """
        hf = self.hf()
        check_tokenizer(self.beside(), hf)
        if isinstance(self.reader, TorchDistReader):
            return dict(as_hf(self.reader.weights(), hf, self.path))
        tensors = self.plain(dtype)
        check_hf(tensors, hf, self.path)
        check_tied(tensors, hf, self.path)
        return {name: tensors[name] for name in family_of(hf).hf_shapes(hf)}


def computes_in(path: Path) -> torch.dtype:
    """The dtype that the config.json in a directory names; bfloat16 where it names none that weights may have."""
    raw = json_object((path / CONFIG).read_bytes())
    found = getattr(torch, str(raw.get("torch_dtype") or raw.get("dtype")), None)
    return found if found in FLOATS else torch.bfloat16


@dataclass(frozen=True)
class Absent:
    """A tensor of which only name, shape and dtype are known."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def rows(self, begin: int, end: int) -> Tensor:
        """Raises WeightsError."""
        raise WeightsError(
            f"{self.name}: the weights are not there, only config.json; with --dry-run give a speed by --gb-per-s"
        )


class AbsentReader:
    """The tensors that a directory with nothing but a config.json would hold."""

    def __init__(self, path: Path) -> None:
        hf = read_hf_config(path)
        dtype = computes_in(path)
        self.files: list[Path] = []
        self._tensors = {name: Absent(name, shape, dtype) for name, shape in family_of(hf).hf_shapes(hf).items()}

    @property
    def names(self) -> set[str]:
        """Every tensor's name."""
        return set(self._tensors)

    def __getitem__(self, name: str) -> Absent:
        return self._tensors[name]


def open_checkpoint(path: Path, hf_dir: Path | None = None, weights_may_be_absent: bool = False) -> Opened:
    """Open a Hugging Face directory or a Megatron checkpoint.

    Args:
        hf_dir: where config.json and the tokenizer are, where none are beside the weights; a Megatron checkpoint may
            have some beside it, which are not copied then.
        weights_may_be_absent: be content with a config.json, for a plan.

    Raises:
        WeightsError: neither, damaged, or of another model than `hf_dir`.
    """
    if not path.is_dir():
        raise WeightsError(f"{path}: no such directory; give a Hugging Face directory or a Megatron checkpoint")
    folder = find_torch_dist(path)
    if folder is None and weights_may_be_absent and (path / CONFIG).is_file() and not any(path.glob("*.safetensors*")):
        return Opened(path, AbsentReader(path), path)
    if folder is None:
        return Opened(path, SafetensorsReader(path), path if (path / CONFIG).is_file() else hf_dir)
    beside = [candidate / HF for candidate in (path, folder, folder.parent) if (candidate / HF / CONFIG).is_file()]
    if hf_dir is None:
        return Opened(path, TorchDistReader(folder), beside[0] if beside else None)
    recorded = read_hf_config(beside[0]).shape if beside else _shape_of_run(folder)
    if changes := changed_shape(recorded, read_hf_config(hf_dir).shape):
        raise WeightsError(
            f"{path}: holds another model than {hf_dir}: {', '.join(changes)}; give the Hugging Face directory of the "
            "model that it was trained from"
        )
    return Opened(path, TorchDistReader(folder), hf_dir)


def _shape_of_run(folder: Path) -> dict[str, Any]:
    """What a run recorded of the model beside its checkpoint; nothing in others."""
    manifest = folder.parent / "manifest.json"
    try:
        found = json_object(manifest.read_bytes()).get("model")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise WeightsError(f"{manifest}: cannot be read ({error}); copy the checkpoint again") from error
    return found if isinstance(found, dict) else {}
