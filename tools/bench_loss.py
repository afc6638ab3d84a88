#!/usr/bin/env python3
"""Time, memory traffic and peak memory of the policy loss against naive PyTorch, torch.compile and other packages.

Four operators: `logprob` (log-probs and entropy of given logits, with their gradient), `logits` (the same and the
policy loss), `linear` (from hidden states and output weight, with both gradients) and `forward` (log-probs and entropy
only, as for the old policy). Runs are interleaved, medians are printed, and a side that cannot run says why.

Bytes per second are those that the operator must move at least: each logit read twice and its gradient written once
(6 bytes per token and column in bf16, 12 in fp32), whatever a side really moves; beside them stands their share of the
copy bandwidth measured here. FLOPs are 6 T H V (2 T H V forward only), whatever a side really computes.

Peak memory is what a step needs beyond its inputs: on CUDA from the allocator; on a CPU the largest resident size
(VmHWM) of a child process of its own, set back once the inputs exist and a first step has been made.

On several devices: `torchrun --nproc-per-node TP tools/bench_loss.py` splits the vocabulary over the ranks.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from tools import loss_bytes  # noqa: E402
from tools.bench_common import load_average, spread  # noqa: E402
from tools.bench_loss_sides import NAIVE, OURS, PRODUCTS, SIDES, Case, LeftOut, Problem, Step  # noqa: E402

SHAPES = {
    "cpu": ("4096,512,64", "1024,32768,64", "512,151936,64"),
    "cuda": ("8192,151936,5120", "8192,131072,4096", "32768,151936,5120"),
}
COPIED_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
FLOPS = {"linear": 6, "forward": 2}


@dataclass
class Measured:
    """Of one side."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak_mib: float | None = None


def main() -> int:
    """Print a table for each comparison."""
    arguments = _arguments()
    if arguments.bytes:
        print(loss_bytes.table())
        return 0
    if arguments.peak_of:
        case, side = json.loads(arguments.peak_of)
        print(_peak_of_this_process(Case(**case), side))
        return 0
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    torch.set_num_threads(arguments.threads)
    group = _join_ranks(arguments.device)
    bandwidth = _copy_bandwidth(arguments.device)
    first = group is None or dist.get_rank(group) == 0
    if first:
        print(f"{_machine(arguments, group)}; copies at {bandwidth / 1e9:.1f} GB/s; {load_average()}", flush=True)
    for case in _cases(arguments):
        sides = [name for name in SIDES[case.operator] if name.startswith(tuple(arguments.sides or [""]))]
        lines = _compare(case, sides, arguments.runs, group, bandwidth)
        if first:
            print("\n".join(lines), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default, help=f"here {default}")
    parser.add_argument("--shapes", nargs="+", metavar="T,V,H", help=f"default: {SHAPES}")
    parser.add_argument("--operators", nargs="+", choices=tuple(SIDES), default=list(SIDES))
    parser.add_argument("--entropy", nargs="+", choices=("metric", "bonus"), default=["metric", "bonus"])
    parser.add_argument("--sides", nargs="+", metavar="NAME", help="only sides whose name begins so (default: all)")
    parser.add_argument("--runs", type=int, default=7, help="interleaved runs of each side (default 7)")
    parser.add_argument(
        "--chunk", type=int, default=None, help="rows of a chunk (default: 128 MB of logits, 4096 at most)"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads on a CPU (default 1)")
    parser.add_argument("--bytes", action="store_true", help="only print counted bytes per token and column")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    return parser.parse_args()


def _cases(arguments: argparse.Namespace) -> Iterator[Case]:
    device, threads = arguments.device, arguments.threads
    for text in arguments.shapes or SHAPES[device]:
        tokens, vocab, hidden = map(int, text.split(","))
        chunk = arguments.chunk or (4096 if device == "cuda" else max(256, min(4096, 2**25 // vocab)))
        for operator in arguments.operators:
            for entropy in arguments.entropy if operator != "forward" else ["metric"]:
                yield Case(operator, entropy, tokens, vocab, hidden, device, threads, chunk)


def _join_ranks(device: str) -> dist.ProcessGroup | None:
    """The tensor-parallel group under torchrun; None for one process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return dist.group.WORLD


def _machine(arguments: argparse.Namespace, group: dist.ProcessGroup | None) -> str:
    ranks = f"TP {1 if group is None else dist.get_world_size(group)}, torch {torch.__version__}"
    if arguments.device == "cpu":
        return f"CPU, fp32, {arguments.threads} thread(s), {ranks}"
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.split()
    return f"{torch.cuda.get_device_name()}, bf16, driver {driver[0] if driver else '?'}, {ranks}"


# ------------------------------------------------------------------------------------------------------------ measuring


def _compare(case: Case, sides: list[str], runs: int, group: dist.ProcessGroup | None, bandwidth: float) -> list[str]:
    """The lines of one table."""
    problem, steps, left_out = Problem(case, group), dict[str, Step](), list[str]()
    for name in sides:
        try:
            steps[name] = SIDES[case.operator][name](problem)
            steps[name]()
        except (LeftOut, RuntimeError) as error:
            steps.pop(name, None)
            left_out.append(f"  {name}: left out: {str(error).strip().splitlines()[0][:120]}")
    found = {name: Measured() for name in steps}
    for _ in range(runs):
        for name, step in steps.items():
            seconds, cpu_seconds = _timed(step, case.device)
            found[name].seconds.append(seconds)
            found[name].cpu_seconds.append(cpu_seconds)
    for name, step in steps.items():
        found[name].peak_mib = _peak_mib(case, name, step, group)
    rows = [_row(name, measured, case, bandwidth) for name, measured in found.items()]
    return [str(case), *rows, *left_out, *_ratios(found)]


def _timed(step: Step, device: str) -> tuple[float, float]:
    """Seconds of one step, by the clock and of this process's CPUs."""
    if dist.is_initialized():
        dist.barrier()
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, 0.0
    clock, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - clock, time.process_time() - cpu


def _copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by a copy much larger than any cache."""
    source = torch.ones(COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = min(_timed(lambda: target.copy_(source), device)[0] for _ in range(6))
    return 2 * source.numel() / seconds


def _peak_mib(case: Case, side: str, step: Step, group: dist.ProcessGroup | None) -> float | None:
    """None where it is not measured: on a CPU with several ranks."""
    if case.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    if group is not None:
        return None
    command = [sys.executable, __file__, "--peak-of", json.dumps([asdict(case), side])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"measuring the memory of {side} failed\n{done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def _peak_of_this_process(case: Case, side: str) -> float:
    """MiB that the second step of a side adds to what is resident before it."""
    torch.set_num_threads(case.threads)
    step = SIDES[case.operator][side](Problem(case))
    step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to what is resident now
    step()
    return (_status_kib("VmHWM") - before) / 1024


def _status_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


# -------------------------------------------------------------------------------------------------------------- showing


def _row(name: str, measured: Measured, case: Case, bandwidth: float) -> str:
    median = statistics.median(measured.seconds)
    words = [f"  {name:27} {spread([1e3 * s for s in measured.seconds], 1):>26} ms"]
    if case.device == "cpu":
        words.append(f"CPU {1e3 * statistics.median(measured.cpu_seconds):8.1f} ms")
    words.append("peak       -    " if measured.peak_mib is None else f"peak {measured.peak_mib:7.0f} MiB")
    if case.operator in ("logprob", "logits"):
        per_second = 3 * (2 if case.device == "cuda" else 4) * case.tokens * case.vocab / _ranks() / median
        words.append(f"{per_second / 1e9:7.1f} GB/s, {per_second / bandwidth:4.0%} of a copy")
    else:
        flops = FLOPS[case.operator] * case.tokens * case.hidden * case.vocab / _ranks() / median
        words.append(f"{flops / 1e12:8.3f} TFLOP/s")
    return "  ".join(words)


def _ratios(found: dict[str, Measured]) -> Iterator[str]:
    """Ours against naive PyTorch and against bare matrix products."""
    for other in (NAIVE, PRODUCTS):
        if OURS not in found or other not in found:
            continue
        ours, theirs = found[OURS], found[other]
        words = [f"time {statistics.median(ours.seconds) / statistics.median(theirs.seconds):.2f}"]
        if any(theirs.cpu_seconds):
            words.append(f"CPU time {statistics.median(ours.cpu_seconds) / statistics.median(theirs.cpu_seconds):.2f}")
        if ours.peak_mib is not None and theirs.peak_mib and other == NAIVE:
            words.append(f"memory {ours.peak_mib / theirs.peak_mib:.2f}")
        yield f"  ours / {other}: {', '.join(words)} (below 1 is better)"


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


if __name__ == "__main__":
    raise SystemExit(main())
