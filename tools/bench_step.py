#!/usr/bin/env python3
"""Seconds per RL step and peak memory of a run with one trainer rank against TRL's GRPOTrainer, on the CPU.

Both sides get the same random Qwen3 of 0.4 million parameters in fp32, prompts, group size, longest response, threads
per process, and optimizer updates per batch of rollouts; both compute old log-probs before the first update. TRL runs
with the fastest setting of a small grid, found first. Runs then alternate; the first step of each is not counted, nor
are start-up and saving. TRL lives in an environment of its own, which is made in the cache directory once.

Ours is several processes (trainer, engine, controller, rewards) that mostly take turns; TRL is one. CPU seconds of all
processes are shown beside the time, since other work on the machine hardly changes them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_rl.data import PromptDataset, PromptTokenizer  # noqa: E402
from megatron_rl.data.quickstart import Quickstart, write_quickstart  # noqa: E402
from tools.bench_common import BenchError, Usage, load_average, run, spread  # noqa: E402

TRL = "trl==1.16.0"
PHASES = ("generate", "pull", "log_probs", "train", "weights")
GRID_TIMEOUT_S = 150.0
LEARNING_RATE = 1e-6  # the model stays the same, so both sides sample answers of the same lengths all along


@dataclass(frozen=True)
class Side:
    """What one run of one side has found."""

    seconds: float
    """Of a step, the median over the steps."""
    cpu_seconds: float
    """Of a step, all processes, the mean over the steps."""
    memory_gib: float
    response_length: float
    phases: dict[str, float]

    @classmethod
    def of(cls, ends: list[float], usage: Usage, response_length: float, phases: dict[str, float]) -> Side:
        """From when each step ended; the first step is not counted."""
        seconds = statistics.median(after - before for before, after in itertools.pairwise(ends))
        cpu_seconds = usage.cpu_between(ends[0], ends[-1]) / (len(ends) - 1)
        return cls(seconds, cpu_seconds, usage.peak_gib, response_length, phases)


def main() -> int:
    """Print the comparison; 1 with an explanation when a side cannot be run."""
    arguments = _arguments()
    try:
        with tempfile.TemporaryDirectory(prefix="bench-step-") as folder:
            _compare(arguments, Path(folder))
    except (BenchError, OSError, subprocess.CalledProcessError) as error:
        print(f"bench_step: {error}", file=sys.stderr)
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs of each side (default 5)")
    parser.add_argument("--steps", type=int, default=6, help="RL steps of a run, the first not counted (default 6)")
    parser.add_argument("--groups", type=int, default=32, help="prompts of a step (default 32)")
    parser.add_argument("--group-size", type=int, default=16, help="samples of a prompt (default 16)")
    parser.add_argument("--response", type=int, default=32, help="longest response, tokens (default 32)")
    parser.add_argument("--updates", type=int, default=2, help="optimizer updates of a step (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a process (default 1)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds of one run (default 900)")
    cache = Path.home() / ".cache" / "megatron-rl" / TRL.replace("==", "-")
    parser.add_argument("--venv", type=Path, default=cache, help=f"TRL's environment, made if absent (default {cache})")
    parser.add_argument("--python", default=sys.executable, help="the Python to make it with")
    parser.add_argument("--ours-only", action="store_true", help="measure our side alone")
    return parser.parse_args()


def _compare(arguments: argparse.Namespace, folder: Path) -> None:
    inputs = folder / "inputs"
    write_quickstart(inputs, Quickstart(prompts=max(512, arguments.groups * arguments.steps)))
    print(f"{arguments.groups} prompts x {arguments.group_size}, responses up to {arguments.response} tokens, ", end="")
    print(f"{arguments.updates} updates, fp32, {arguments.threads} thread(s) a process; {load_average()}", flush=True)
    if not arguments.ours_only:
        python = _trl_python(arguments)
        setting = _best_setting(arguments, python, folder)
    ours, theirs = [], []
    for number in range(arguments.runs):
        ours.append(_run_ours(arguments, folder / f"ours-{number}", inputs))
        print(f"run {number}: ours {ours[-1].seconds:.2f} s/step ({ours[-1].cpu_seconds:.2f} CPU)", end="", flush=True)
        if not arguments.ours_only:
            theirs.append(_run_trl(arguments, python, folder / f"trl-{number}", inputs, setting))
            print(f", TRL {theirs[-1].seconds:.2f} s/step ({theirs[-1].cpu_seconds:.2f} CPU)", end="")
        print(f"; {load_average()}", flush=True)
    _show("ours", ours)
    phases = {name: statistics.median(side.phases[name] for side in ours) for name in PHASES}
    print("  of these: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items()))
    if theirs:
        _show(f"TRL ({TRL}, {setting})", theirs)
        names = {"time": "seconds", "CPU time": "cpu_seconds", "memory": "memory_gib"}
        ratios = [f"{name} {_median(ours, key) / _median(theirs, key):.2f}" for name, key in names.items()]
        print(f"ours / TRL: {', '.join(ratios)} (below 1 is better)")


def _median(sides: list[Side], key: str) -> float:
    return statistics.median(getattr(side, key) for side in sides)


def _show(name: str, sides: list[Side]) -> None:
    steps, cpu = spread([side.seconds for side in sides]), spread([side.cpu_seconds for side in sides])
    print(f"{name}: {steps} s/step, {cpu} CPU s/step, ", end="")
    print(f"peak memory {_median(sides, 'memory_gib'):.2f} GiB, ", end="")
    print(f"mean response {_median(sides, 'response_length'):.1f} tokens")


# ----------------------------------------------------------------------------------------------------------- our side


def _run_ours(arguments: argparse.Namespace, folder: Path, inputs: Path) -> Side:
    folder.mkdir()
    config = folder / "config.yaml"
    config.write_text(json.dumps(_config(arguments, folder / "run", inputs)))  # JSON is YAML
    command = [sys.executable, "-m", "megatron_rl.cli", "train", str(config)]
    usage = run(command, folder / "log", arguments.threads, arguments.timeout)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "policy/loss" in row]
    phases = {name: statistics.median(row[f"time/{name}"] for row in rows[1:]) for name in PHASES}
    length = statistics.mean(row["rollout/response_length_mean"] for row in rows)
    return Side.of([row["time"] for row in rows], usage, length, phases)


def _config(arguments: argparse.Namespace, run_dir: Path, inputs: Path) -> dict[str, Any]:
    return {
        "name": "bench",
        "run_dir": str(run_dir),
        "steps": arguments.steps,
        "model": {"path": str(inputs / "model"), "dtype": "float32", "make_vocab_size_divisible_by": 32},
        "optimizer": {"lr": LEARNING_RATE},
        "algorithm": {
            "preset": "dapo",
            "updates_per_batch": arguments.updates,
            "max_tokens_per_microbatch": 16384,
        },
        "data": {"prompts": str(inputs / "train.jsonl")},
        "rollout": {
            "groups_per_step": arguments.groups,
            "group_size": arguments.group_size,
            "max_prompt_tokens": 16,
            "max_response_tokens": arguments.response,
            "dynamic_sampling": "off",
        },
        "reward": {"components": [{"name": "sorting", "correctness": True}]},
        "checkpoint": {"every": 0},
        "logging": {"console": "plain"},
    }


# ----------------------------------------------------------------------------------------------------------------- TRL


def _trl_python(arguments: argparse.Namespace) -> Path:
    """The interpreter of TRL's environment; made with the torch that we run with."""
    import torch

    python: Path = arguments.venv / "bin" / "python"
    if not (arguments.venv / "complete").exists() and not _imports_trl(python):
        log = arguments.venv.with_name(arguments.venv.name + ".log")
        print(f"making {arguments.venv} with {TRL}; this takes minutes (log: {log})", flush=True)
        subprocess.run([arguments.python, "-m", "venv", "--clear", str(arguments.venv)], check=True)
        _install(python, log, torch.__version__)
        (arguments.venv / "complete").touch()
    return python


def _install(python: Path, log: Path, torch_version: str) -> None:
    """torch first and alone: only it may come from the index of CPU builds, where nothing else need be looked for."""
    words = [str(python), "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
    attempts = [
        [*words, f"torch=={torch_version}"],
        [*words, "--index-url", "https://download.pytorch.org/whl/cpu", f"torch=={torch_version}"],
    ]
    with log.open("w") as out:
        if not any(subprocess.run(attempt, stdout=out, stderr=out).returncode == 0 for attempt in attempts):
            raise BenchError(f"torch {torch_version} cannot be installed for {TRL}; {log} says why")
        if subprocess.run([*words, TRL, f"torch=={torch_version}"], stdout=out, stderr=out).returncode != 0:
            raise BenchError(f"{TRL} cannot be installed; {log} says why")


def _imports_trl(python: Path) -> bool:
    code = "import importlib.metadata as m; print('trl==' + m.version('trl'))"
    if not python.exists():
        return False
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    return done.stdout.strip() == TRL


def _best_setting(arguments: argparse.Namespace, python: Path, folder: Path) -> dict[str, Any]:
    """Try the grid, three steps each."""
    per_update = arguments.groups * arguments.group_size // arguments.updates
    batches = sorted({per_update, max(arguments.group_size, per_update // 4)}, reverse=True)
    grid = [{"per_device_batch": batch, "continuous_batching": False} for batch in batches]
    grid.append({"per_device_batch": per_update, "continuous_batching": True})
    found = []
    shorter = argparse.Namespace(**{**vars(arguments), "steps": 3, "timeout": min(arguments.timeout, GRID_TIMEOUT_S)})
    for number, setting in enumerate(grid):
        try:
            side = _run_trl(shorter, python, folder / f"grid-{number}", folder / "inputs", setting)
        except BenchError as error:
            print(f"TRL with {setting}: left out: {str(error).strip().splitlines()[-1][:160]}", flush=True)
            continue
        found.append((side.cpu_seconds, number))
        print(
            f"TRL with {setting}: {side.seconds:.2f} s/step ({side.cpu_seconds:.2f} CPU); {load_average()}", flush=True
        )
    if not found:
        raise BenchError("TRL ran with no setting of the grid")
    return grid[min(found)[1]]


def _run_trl(arguments: argparse.Namespace, python: Path, folder: Path, inputs: Path, setting: dict[str, Any]) -> Side:
    folder.mkdir()
    records = PromptDataset.load(inputs / "train.jsonl")
    tokenizer = PromptTokenizer(inputs / "model")
    spec = {
        "model": str(inputs / "model"),
        "prompts": [tokenizer.render(record) for record in records],  # both sides see the same tokens
        "answers": [record.answer for record in records],
        "output_dir": str(folder / "output"),
        "steps": arguments.steps,
        "updates": arguments.updates,
        "group_size": arguments.group_size,
        "samples": arguments.groups * arguments.group_size,
        "max_new_tokens": arguments.response,
        "lr": LEARNING_RATE,
        "seed": 0,
        **setting,
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    script, out = str(ROOT / "tools" / "bench_step_trl.py"), folder / "out.json"
    command = [str(python), script, str(folder / "spec.json"), str(out)]
    usage = run(command, folder / "log", arguments.threads, arguments.timeout)
    found = json.loads(out.read_text())
    return Side.of(found["ends"], usage, found["response_length"], {})


if __name__ == "__main__":
    sys.exit(main())
