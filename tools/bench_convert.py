#!/usr/bin/env python3
"""Speed and memory of the converter against a bare safetensors read and write of the same bytes, in one run.

The baseline is what a script of five lines does: load a file with safetensors, save its tensors again, sync. Sides take
turns, each in a process of its own, on one directory; the page cache is as the side before has left it. Printed are
bytes read per second (as many are written), the ratio of the medians, the CPU time, which other work on the machine
changes less, and each side's peak of resident memory above what it had when its modules were imported.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_rl.config import read_hf_config  # noqa: E402
from megatron_rl.files import sync  # noqa: E402
from megatron_rl.weights.convert.cuts import TargetLayout  # noqa: E402
from megatron_rl.weights.convert.job import LEAST_MEMORY  # noqa: E402
from megatron_rl.weights.convert.opened import Opened, open_checkpoint  # noqa: E402
from megatron_rl.weights.families import family_of  # noqa: E402
from tools.bench_common import BenchError, load_average, spread  # noqa: E402

SIDES = ("baseline", "hf-to-megatron", "megatron-to-hf", "cast")
SHARD_BYTES = 10**9


def main() -> int:
    """Measure and print; 0, or 1 with the end of what failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the random model")
    parser.add_argument("--experts", type=int, default=0, help="of each layer; 0 = a dense Llama, else a Qwen3")
    parser.add_argument("--runs", type=int, default=3, help="of each side; they take turns")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary one")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        print(json.dumps(run_side(arguments.side, arguments.folder)))
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        try:
            compare(Path(name), arguments.gib, arguments.experts, arguments.runs)
        except BenchError as error:
            print(f"bench_convert: {error}", file=sys.stderr)
            return 1
    return 0


def compare(folder: Path, gib: float, experts: int, runs: int) -> None:
    """Make the model and its conversion once, then let the sides take turns."""
    size = write_random_model(folder / "hf", int(gib * 2**30), experts)
    what = f"Qwen3 with {experts} experts a layer" if experts else "Llama"
    limit = f"--max-memory {LEAST_MEMORY // 2**20} MiB"
    print(f"random bf16 {what}, {size / 1e9:.2f} GB; {load_average()}; {limit}, the least", flush=True)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
    peaks: dict[str, list[float]] = {side: [] for side in SIDES}
    start(folder, "hf-to-megatron")
    (folder / "out").rename(folder / "megatron")
    for _ in range(runs):
        for side in SIDES:
            found = start(folder, side)
            shutil.rmtree(folder / "out")
            seconds[side].append(found["seconds"])
            cpu[side].append(found["cpu_seconds"] / size * 1e9)
            peaks[side].append(found["peak_bytes"] / 2**20)
    bare = statistics.median(seconds["baseline"])
    print(f"{'side':16} {'GB/s':>20} {'of baseline':>12} {'CPU seconds per GB':>20} {'peak memory, MiB':>22}")
    for side in SIDES:
        rates = [size / 1e9 / taken for taken in seconds[side]]
        ratio = bare / statistics.median(seconds[side])
        print(f"{side:16} {spread(rates):>20} {ratio:>12.2f} {spread(cpu[side]):>20} {spread(peaks[side], 0):>22}")


def start(folder: Path, side: str) -> dict[str, float]:
    """Run one side in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--side", side, "--folder", str(folder)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise BenchError(f"{side}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_side(side: str, folder: Path) -> dict[str, float]:
    """In the process of a side: do it once, and say how long it took and what memory it needed."""
    from safetensors.torch import load_file, save_file

    from megatron_rl.weights.convert import actions

    before, began, cpu = _peak_bytes(), time.monotonic(), time.process_time()
    out = folder / "out"
    if side == "baseline":
        out.mkdir()
        for file in sorted((folder / "hf").glob("*.safetensors")):
            save_file(load_file(file), out / file.name, metadata={"format": "pt"})
            sync(out / file.name)
    else:
        source = open_checkpoint(folder / ("megatron" if side == "megatron-to-hf" else "hf"))
        plan = {
            "hf-to-megatron": lambda: actions.hf_to_megatron(source, out, _layout(source), None),
            "megatron-to-hf": lambda: actions.megatron_to_hf(source, out, None, SHARD_BYTES),
            "cast": lambda: actions.cast(source, out, torch.float16, SHARD_BYTES),
        }[side]()
        plan.run(_silent)
    return {
        "seconds": time.monotonic() - began,
        "cpu_seconds": time.process_time() - cpu,
        "peak_bytes": _peak_bytes() - before,
    }


def _layout(source: Opened) -> TargetLayout:
    return TargetLayout(2, 2, expert=1 if source.hf().moe is None else 2)


def _silent(size: int) -> None:
    """Nobody watches."""


def _peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def write_random_model(path: Path, size: int, experts: int) -> int:
    """A model of about `size` bytes in bf16, in files of a GB; returns the bytes of its tensors."""
    from megatron_rl.weights.convert.actions import Conversion
    from megatron_rl.weights.convert.hf_target import HfTarget

    hidden, ffn, vocab = 2048, 8192, 32768
    mlp = {"model_type": "llama", "intermediate_size": ffn}
    layer = 4 * hidden * hidden + 3 * hidden * ffn
    if experts:
        mlp |= {
            "model_type": "qwen3_moe",
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 768,
        }
        layer = 4 * hidden * hidden + experts * 3 * hidden * 768
    layers = max(2, 2 * round((size / 2 - 2 * vocab * hidden) / layer / 2))
    described = mlp | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
    }
    beside = path.with_name("config")
    beside.mkdir()
    (beside / "config.json").write_text(json.dumps(described))
    hf = read_hf_config(beside)
    tensors = {name: _Random(name, shape) for name, shape in family_of(hf).hf_shapes(hf).items()}
    plan = Conversion(HfTarget(tensors, beside, SHARD_BYTES), path, {})
    plan.run(_silent)
    return plan.size


class _Random:
    """A tensor of random numbers, made when it is asked for."""

    dtype = torch.bfloat16

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.shape = name, shape

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return torch.randn(end - begin, *self.shape[1:]).to(self.dtype)


if __name__ == "__main__":
    sys.exit(main())
