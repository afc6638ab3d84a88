"""Real runs of the command line on tiny inputs, for the tests beside this file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


@dataclass(frozen=True)
class FinishedRun:
    """What a run left behind."""

    code: int
    output: str
    folder: Path

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl that belong to an RL step."""
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [row for row in rows if "policy/loss" in row]

    @cached_property
    def result(self) -> dict[str, Any]:
        """The JSON behind RESULT on the last line."""
        last = self.output.strip().splitlines()[-1]
        assert last.startswith("RESULT "), self.output
        return json.loads(last.removeprefix("RESULT "))


def make_inputs(folder: Path, seed: int = 1, **options: Any) -> Path:
    """Tiny model, tokenizer and prompts, as the quickstart makes them."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    words = [name if value is None else f"{name}={value}" for name, value in flags.items()]
    command = [sys.executable, str(ROOT / "tools" / "make_quickstart.py"), "--out", str(folder), "--seed", str(seed)]
    subprocess.run([*command, *words], check=True, capture_output=True, timeout=120)
    return folder


def train_command(folder: Path, inputs: Path, *words: str, config: Path = QUICKSTART) -> list[str]:
    """The command line of a run in `folder`. `words`: overrides and options."""
    command = [sys.executable, "-m", "megatron_rl.cli", "train", str(config), f"run_dir={folder}"]
    return [*command, f"vars.inputs={inputs}", "logging.console=plain", *words]


def environment() -> dict[str, str]:
    """This process's, in which the package of this checkout is found."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def train(
    folder: Path,
    inputs: Path,
    *words: str,
    config: Path = QUICKSTART,
    timeout: float = 400,
    largest_file: int | None = None,
) -> FinishedRun:
    """`megatron-rl train` to its end. `words`: overrides and options; `largest_file`: bytes that a file may have."""
    command = train_command(folder, inputs, *words, config=config)
    if largest_file is not None:
        command = ["prlimit", f"--fsize={largest_file}", *command]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, env=environment()
    )
    return FinishedRun(done.returncode, done.stdout, folder)


def run_tool(name: str, *words: str, timeout: float = 300) -> str:
    """What a program in tools/ printed; it must succeed."""
    command = [sys.executable, str(ROOT / "tools" / name), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
