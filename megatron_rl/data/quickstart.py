"""Writes the directory of the quickstart: a model and its prompt files; the rules behind these are `generators.py`.

DIR/model/          a random Qwen3 of 0.4 million parameters with its tokenizer
DIR/train.jsonl     prompts to learn from          DIR/eval.jsonl   held-out prompts, none of them in the others
DIR/sft.jsonl       warm-up examples that teach the format
DIR/quickstart.json what the directory was made from, and the mark that it may be replaced
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import orjson

from megatron_rl.files import sync

from .generators import Prompts, countdown, sort_digits
from .records import DataError
from .tiny_model import write_tiny_model

MARK = "quickstart.json"


@dataclass(frozen=True)
class Quickstart:
    """What to write. `prompts`, `eval_prompts` and `sft_prompts` are numbers of records.

    `digits` is used by `sort`, `style` by `countdown` (`english` for a real language model). Without `model` only the
    prompt files are written; with `experts` it is a mixture of that many.
    """

    seed: int = 0
    task: Literal["sort", "countdown"] = "sort"
    digits: int = 4
    prompts: int = 4096
    eval_prompts: int = 512
    sft_prompts: int = 4096
    style: Literal["compact", "english"] = "compact"
    model: bool = True
    experts: int = 0

    def make_prompts(self) -> Prompts:
        """The records; raises `DataError` when there are not as many different ones."""
        counts = (self.prompts, self.eval_prompts, self.sft_prompts)
        if self.experts < 0 or self.experts == 1:
            raise DataError(f"experts={self.experts}: 0 for none, else 2 or more, since each token gets 2 of them")
        if min(counts) < 0 or self.prompts < 1:
            raise DataError(f"prompts, eval_prompts, sft_prompts = {counts}: at least 1 prompt, and none negative")
        if self.task == "sort":
            return sort_digits(self.seed, *counts, digits=self.digits)
        if self.style == "english":
            return countdown(self.seed, *counts, (3, 4), max_number=25, operators="+-*", style="english")
        return countdown(self.seed, *counts)


def write_quickstart(out: Path, what: Quickstart) -> None:
    """Write `out`; the same arguments give the same bytes.

    A directory written before is replaced as a whole, any other one that is not empty is refused (`DataError`).
    """
    if out.exists() and not (out / MARK).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"{out} exists and was not written by this tool; choose another directory, or remove it")
    prompts = what.make_prompts()
    out.parent.mkdir(parents=True, exist_ok=True)
    before, temporary = (out.with_name(f".{out.name}.{os.getpid()}.{part}") for part in ("before", "tmp"))
    temporary.mkdir()
    try:
        _fill(temporary, what, prompts)
        if out.exists():
            os.replace(out, before)
        os.replace(temporary, out)
    finally:
        for left in (before, temporary):
            shutil.rmtree(left, ignore_errors=True)


def _fill(directory: Path, what: Quickstart, prompts: Prompts) -> None:
    if what.model:
        write_tiny_model(directory / "model", what.seed, what.experts)
    for name, records in (("train", prompts.train), ("eval", prompts.evaluation), ("sft", prompts.sft)):
        lines = b"".join(orjson.dumps(record.to_dict()) + b"\n" for record in records)
        (directory / f"{name}.jsonl").write_bytes(lines)
    (directory / MARK).write_bytes(orjson.dumps(asdict(what), option=orjson.OPT_INDENT_2) + b"\n")
    for file in directory.rglob("*"):
        sync(file)
