"""The weights of the served model: loading, replacing all from disk or some from tensors, checksums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from megatron_rl.files import regular

from .experts import named_views
from .options import Dtype


class WeightsError(ValueError):
    """Weights cannot be used, or not now; the message names the directory or the tensor, and the fault."""


def load_model(path: str, dtype: Dtype) -> PreTrainedModel:
    """The model in a Hugging Face directory, in evaluation mode. Raises WeightsError."""
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype="auto" if dtype == "auto" else getattr(torch, dtype), local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise WeightsError(f"{path}: cannot be loaded: {error}") from error
    return model.eval().requires_grad_(False)


class Weights:
    """Parameters of one loaded model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._parameters = dict(named_views(model))  # tied ones once
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._aliases = tied - {name for name, _ in model.named_parameters()}

    def update(self, path: str) -> None:
        """Replace all parameters by those in the safetensors files of `path`.

        Raises:
            WeightsError: a file is missing or damaged, or names or shapes are not this model's. Nothing has changed.
        """
        staged = self._read(Path(path))
        for name, parameter in self._parameters.items():
            parameter.copy_(staged.pop(name))

    def replace(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Replace parameters by tensors with their names, in any order; a second name of a tied one is passed over.

        Raises:
            WeightsError: a name or shape is not this model's, or a tensor holds no numbers. None has been replaced.
        """
        wanted = [(n, t) for n, t in tensors if n not in self._aliases and not n.endswith("rotary_emb.inv_freq")]
        for name, tensor in wanted:
            self._require(name, tensor)
        for name, tensor in wanted:
            self._parameters[name].copy_(tensor)

    def _require(self, name: str, tensor: torch.Tensor) -> None:
        parameter = self._parameters.get(name)
        if parameter is None:
            fault = f"{name} is no parameter of the served model"
        elif tensor.shape != parameter.shape:
            fault = f"{name} has shape {tuple(tensor.shape)}, served is {tuple(parameter.shape)}"
        elif not tensor.is_floating_point():
            fault = f"{name} holds {tensor.dtype}, served is {parameter.dtype}"
        else:
            return
        raise WeightsError(
            f"Failed to update parameter online: {fault}. What was sent before it in this session is in place: "
            "please discard the whole weights."
        )

    def _read(self, folder: Path) -> dict[str, torch.Tensor]:
        """All parameters in this model's formats. Names and shapes are checked before any data is read."""
        try:
            with ExitStack() as stack:
                files = [stack.enter_context(safe_open(regular(file), "pt")) for file in _files(folder)]
                where = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a mapping
                self._check(folder, {name: tuple(file.get_slice(name).get_shape()) for name, file in where.items()})
                return {n: where[n].get_tensor(n).to(p.dtype) for n, p in self._parameters.items()}
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            if isinstance(error, WeightsError):
                raise
            raise WeightsError(f"{folder}: cannot be read: {error}") from error

    def _check(self, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        missing = sorted(self._parameters.keys() - shapes.keys())
        known = self._parameters.keys() | self._aliases
        surplus = sorted(n for n in shapes.keys() - known if not n.endswith("rotary_emb.inv_freq"))
        if missing or surplus:
            raise WeightsError(
                f"{folder}: not the weights of the served model: {len(missing)} parameters missing {missing[:3]}, "
                f"{len(surplus)} unknown {surplus[:3]}"
            )
        for name, parameter in self._parameters.items():
            if shapes[name] != tuple(parameter.shape):
                raise WeightsError(f"{folder}: {name} has shape {shapes[name]}, served is {tuple(parameter.shape)}")

    def checksums(self) -> dict[str, str]:
        """Parameter name -> SHA-256 of its format, shape and bytes, in hex; the same in every process."""
        found = {}
        for name, parameter in self._parameters.items():
            digest = hashlib.sha256(f"{parameter.dtype} {tuple(parameter.shape)}".encode())
            digest.update(parameter.detach().contiguous().flatten().view(torch.uint8).numpy().data)
            found[name] = digest.hexdigest()
        return found


def overall_checksum(checksums: dict[str, str]) -> str:
    """One SHA-256 over all names and checksums, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(checksums):
        digest.update(f"{name}={checksums[name]}\n".encode())
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    """The files of the index, else all safetensors files of the folder."""
    if not folder.is_dir():
        raise WeightsError(f"{folder}: no such directory")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder}: no safetensors files there")
    return files
