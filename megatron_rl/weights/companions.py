"""What stands beside the weights of a Hugging Face directory: config, generation config, tokenizer, chat template."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_rl.files import json_object, write_atomic
from megatron_rl.weights import WeightsError, fp8

if TYPE_CHECKING:
    from megatron_rl.config import HfConfig

_WEIGHT_FILES = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx)(\.index\.json)?")
CONFIG = "config.json"
_FURTHER = "num_nextn_predict_layers"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def companions_of(folder: Path) -> list[Path]:
    """The files of a directory that hold no weights, links among them.

    Raises:
        WeightsError: a link leads nowhere: what it should lead to may be the tokenizer.
    """
    found = [
        file
        for file in sorted(folder.iterdir())
        if not (file.is_dir() or file.name.startswith(".") or _WEIGHT_FILES.fullmatch(file.name))
    ]
    if dangling := [file for file in found if not file.exists()]:
        raise WeightsError(f"{dangling[0]}: a link to {dangling[0].readlink()}, which is not there; copy the file")
    return [file for file in found if file.is_file()]


def copy_companions(source: Path, out: Path, dtype: torch.dtype | None = None, names: Iterable[str] = ()) -> None:
    """Copy the `companions_of` the directory `source`.

    Args:
        dtype: of the weights, for config.json; None = what it said. float8_e4m3fn: in blocks (`fp8`), the rest in
            bfloat16; with another one no word of a quantisation of the source's is left.
        names: of the tensors that are written. Where none is of a layer that predicts tokens further on, and `dtype`
            is given, config.json says that there are no such layers.
    """
    out.mkdir(exist_ok=True)
    for file in companions_of(source):
        shutil.copyfile(file, out / file.name)
    if dtype is None:
        return
    config = json_object((source / CONFIG).read_bytes())
    # transformers 5 reads "dtype", transformers 4 and SGLang "torch_dtype".
    computed = torch.bfloat16 if dtype is fp8.FP8 else dtype
    config |= dict.fromkeys({"torch_dtype"} | ({"dtype"} & config.keys()), str(computed).removeprefix("torch."))
    config.pop("quantization_config", None)
    layers = {int(match[1]) for name in names if (match := _LAYER.match(name))}
    if _FURTHER in config and max(layers, default=-1) < config["num_hidden_layers"]:
        config[_FURTHER] = 0
    if dtype is fp8.FP8:
        config["quantization_config"] = fp8.quantization_config()
    write_atomic(out / CONFIG, json.dumps(config, indent=2))


def check_tokenizer(folder: Path, hf: HfConfig) -> None:
    """Whether the model has a row for every token; a model may have more, a directory no tokenizer.json.

    Raises:
        WeightsError: the tokenizer has ids at or past `vocab_size`, or its file cannot be read.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    try:
        described = json_object(file.read_bytes())
        vocab = described["model"]["vocab"]
        ids = [len(vocab) - 1] if isinstance(vocab, list) else list(vocab.values())
        ids += [token["id"] for token in described.get("added_tokens") or ()]
        if wrong := [number for number in ids if type(number) is not int]:
            raise ValueError(f"{wrong[0]!r} is no id of a token")
        largest = max(ids, default=-1)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{file}: not a tokenizer ({error}); copy the file from the model again") from error
    if largest >= hf.vocab_size:
        raise WeightsError(
            f"{file}: has token ids up to {largest}, but config.json says vocab_size={hf.vocab_size}; the tokenizer "
            "belongs to another model, or the embedding was not enlarged for the tokens that were added"
        )
