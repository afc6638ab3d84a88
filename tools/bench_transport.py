"""How fast new weights reach two real SGLang servers, against the bare thing in the same run.

    broadcast   begin of the session -> buckets -> end, both servers hold the weights
                against ONE gloo broadcast of the same bytes, lying ready in one tensor, to two bare processes
    disk        a version directory, written durably, and both servers have loaded it
                against safetensors' own save_file, made durable, and load_file of the same tensors

    python -m tools.bench_transport [--mib 512] [--bucket-mib 32] [--rounds 3] [--unpaused]

The model is random, with next to no vocabulary and wide layers. Needs `launch/install_sglang.sh`, about 10 GiB of
memory, and room for three times the weights in --folder. Rounds of both sides alternate, medians count.

While it is paused, SGLang's scheduler polls for messages without rest: each server takes a core, which a small machine
lacks. --unpaused leaves the pause out; the servers have nothing to do anyway.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch

from tools.bench_common import START_S, BenchError, await_engine, load_average, spread

ROOT = Path(__file__).resolve().parents[1]
HIDDEN, FFN, VOCAB = 1024, 2048, 512
TIMEOUT_S = 120.0
MIB = 2**20


def model_of(folder: Path, mib: int) -> tuple[Path, int]:
    """A random float32 Qwen3 of at least so many MiB; its directory and bytes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from megatron_rl.data.tiny_model import write_tiny_model

    write_tiny_model(folder, seed=0)  # for its tokenizer
    layer = 4 * (HIDDEN * HIDDEN * 2 + 3 * HIDDEN * FFN + HIDDEN * HIDDEN)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=-(-mib * MIB // layer),
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=HIDDEN // 16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return folder, sum(p.numel() * p.element_size() for p in model.parameters())


# ------------------------------------------------------------------------------------------------------ the two sides


@contextlib.contextmanager
def servers(
    engine: str, python: Path, model: Path, folder: Path, count: int = 2
) -> Iterator[tuple[list[str], list[psutil.Process]]]:
    """Addresses of servers that are ready, and their processes, which are all ended."""
    places = [folder / f"server-{i}" for i in range(count)]
    started = []
    for place in places:
        endpoint = str(place.with_suffix(".json"))
        words = [sys.executable, "-m", "tools.bench_transport", "serve", engine, str(python), str(model), endpoint]
        with place.with_suffix(".log").open("wb") as log:
            started.append(subprocess.Popen(words, stdout=log, stderr=log, cwd=ROOT))
    try:
        deadline = time.monotonic() + START_S
        found = [await_engine(place, process, deadline) for place, process in zip(places, started, strict=True)]
        trees = [[one.process, *one.process.children(recursive=True)] for one in found]
        yield [one.url for one in found], [process for tree in trees for process in tree]
    except BenchError as error:
        sys.exit(str(error))
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            process.wait(60)


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Used so far by these processes and this one."""
    times = [process.cpu_times() for process in (*processes, psutil.Process())]
    return sum(time.user + time.system for time in times)


def serve(engine: str, python: str, model: str, endpoint_file: str) -> None:
    """One server, in a process of its own; without the memory for many requests, which it would take otherwise."""
    from megatron_rl.engines.embedded.options import EmbeddedOptions
    from megatron_rl.engines.serve import serve_embedded
    from megatron_rl.engines.sglang import serve_sglang
    from megatron_rl.engines.sglang_command import SglangOptions

    if engine == "embedded":
        serve_embedded(EmbeddedOptions(model, endpoint_file=endpoint_file, dtype="float32", num_threads=1))
        return
    few = ("--max-total-tokens", "2048")
    options = SglangOptions(
        model, python, endpoint_file=endpoint_file, dtype="float32", max_running_requests=4, extra_args=few
    )
    serve_sglang(options, os.environ)


RECEIVER = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
port, rank, size, rounds = map(int, sys.argv[1:])
timeout = timedelta(seconds=600)
store = TCPStore("127.0.0.1", port, None, False, timeout)
group = dist.ProcessGroupGloo(PrefixStore("cpu/", store), rank, 3, timeout)
tensor, options = torch.zeros(size, dtype=torch.uint8), dist.BroadcastOptions()
options.rootRank = 0
for _ in range(rounds):
    group.broadcast([tensor], options).wait(timeout)
    group.barrier().wait(timeout)
"""


class Bare:
    """One flat broadcast to two processes that do nothing else."""

    def __init__(self, size: int, rounds: int) -> None:
        import torch.distributed as dist
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        timeout = timedelta(seconds=600)
        self._store = TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
        words = [str(self._store.port)]
        self._processes = [
            subprocess.Popen([sys.executable, "-c", RECEIVER, *words, str(rank), str(size), str(rounds)])
            for rank in (1, 2)
        ]
        self.processes = [psutil.Process(process.pid) for process in self._processes]
        self._group = dist.ProcessGroupGloo(PrefixStore("cpu/", self._store), 0, 3, timeout)
        self._timeout, self._options = timeout, dist.BroadcastOptions()
        self._options.rootRank = 0
        self._tensor = torch.ones(size, dtype=torch.uint8)

    def seconds(self) -> float:
        """Of one broadcast, until both have it."""
        began = time.perf_counter()
        self._group.broadcast([self._tensor], self._options).wait(self._timeout)  # type: ignore[attr-defined]
        self._group.barrier().wait(self._timeout)  # type: ignore[attr-defined]
        return time.perf_counter() - began

    def close(self) -> None:
        """After all rounds."""
        for process in self._processes:
            process.wait(60)


@dataclass
class Trainer:
    """One rank with the model, and its transport."""

    chunks: Sequence[Any]
    hf: Any
    broadcast: Any
    control: Any
    pauses: bool
    version: int = 0

    def update(self, send: Callable[[Any], None], in_session: bool) -> tuple[float, float]:
        """Seconds from begin to end of the weights themselves, and of the whole update with all its checks."""
        self.version += 1
        update = self.control.begin_update(self.version)
        began = time.perf_counter()
        if self.pauses:
            update.pause("retract")
        if in_session:
            update.begin()
        inner = time.perf_counter()
        send(update)
        if in_session:
            update.end()
        inner = time.perf_counter() - inner
        update.compare()
        update.resume()
        if update.failed:
            sys.exit("; ".join(map(str, update.failed.values())))
        return inner, time.perf_counter() - began


def open_trainer(model: Path, urls: list[str], bucket_mib: int, pauses: bool = True) -> Trainer:
    """A single trainer rank."""
    import torch.distributed as dist

    from megatron_rl.cluster.bootstrap import find_place
    from megatron_rl.config import read_hf_config
    from megatron_rl.config.model import ModelConfig
    from megatron_rl.config.parallel import ParallelConfig
    from megatron_rl.policy import distributed
    from megatron_rl.policy.model import build_model
    from megatron_rl.rollout.control import EngineControl
    from megatron_rl.weights.load import load_hf_weights
    from megatron_rl.weights.transports.broadcast import Broadcast, BroadcastSettings

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    distributed.initialize(find_place(os.environ, Path()), ParallelConfig(), 0, TIMEOUT_S, "cpu")
    hf = read_hf_config(model)
    chunks = build_model(hf, ModelConfig(path=str(model), dtype="float32"), ParallelConfig())
    load_hf_weights(chunks, hf, model)
    control = EngineControl(urls, timeout_s=TIMEOUT_S)
    settings = BroadcastSettings(torch.float32, bucket_mib * MIB, 8, 1, "gloo")
    store = dist.distributed_c10d._get_default_store()
    return Trainer(chunks, hf, Broadcast(chunks, hf, settings, control.calls, store), control, pauses)


class PeakMemory:
    """Most memory above that at the beginning, bytes; the system's own high-water mark."""

    def __enter__(self) -> PeakMemory:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.extra = _status("VmHWM") - self._before


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


# ------------------------------------------------------------------------------------------------------- comparisons


@dataclass
class Sides:
    """Seconds of each round: ours, the bare one's, those of whole updates; CPU seconds of all processes; peak bytes."""

    ours: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    our_cpu: list[float] = field(default_factory=list)
    bare_cpu: list[float] = field(default_factory=list)
    peak: int = 0


def compare_broadcast(trainer: Trainer, bare: Bare, processes: Sequence[psutil.Process], rounds: int) -> Sides:
    """Both sides in turn. The first round is warm-up."""
    found = Sides()
    for number in range(rounds + 1):
        before = cpu_seconds(bare.processes)
        seconds, bare_cpu = bare.seconds(), cpu_seconds(bare.processes) - before
        used: list[float] = []

        def send(update: Any, used: list[float] = used) -> None:
            before = cpu_seconds(processes)
            update.leave_out(trainer.broadcast.send(trainer.version, update.left))
            used.append(cpu_seconds(processes) - before)

        with PeakMemory() as memory:
            inner, whole = trainer.update(send, in_session=True)
        found.peak = max(found.peak, memory.extra)
        if number:
            found.bare.append(seconds)
            found.ours.append(inner)
            found.whole.append(whole)
            found.our_cpu += used
            found.bare_cpu.append(bare_cpu)
    return found


def compare_disk(
    trainer: Trainer, model: Path, folder: Path, bucket_mib: int, rounds: int
) -> tuple[list[float], list[float], int]:
    """Seconds of both sides, and the writer's peak memory."""
    from safetensors.torch import load_file, save_file

    from megatron_rl.files import sync
    from megatron_rl.weights.version_dir import version_path, write_version

    tensors = {name: tensor.clone() for name, tensor in load_file(model / "model.safetensors").items()}
    ours, bare, peak = [], [], 0
    for number in range(rounds + 1):
        file = folder / f"bare-{number}.safetensors"
        began = time.perf_counter()
        save_file(tensors, file)
        sync(file)
        for tensor in load_file(file).values():
            tensor.sum()  # a mapped file is read when it is looked at
        seconds = time.perf_counter() - began
        file.unlink()
        path = version_path(folder, trainer.version + 1)
        began = time.perf_counter()
        with PeakMemory() as memory:
            write_version(trainer.chunks, trainer.hf, model, path, torch.float32, bucket_mib * MIB)
        written = time.perf_counter() - began
        inner, _ = trainer.update(_load_from(path), in_session=False)
        shutil.rmtree(path)
        peak = max(peak, memory.extra)
        if number:
            ours.append(written + inner)
            bare.append(seconds)
    return ours, bare, peak


def _load_from(path: Path) -> Callable[[Any], None]:
    return lambda update: update.load_from_disk(path, {}, flush=True)


def report(title: str, ours: list[float], bare: list[float], size: int, target: float) -> float:
    """Print one comparison; returns its ratio."""
    ratio = statistics.median(bare) / statistics.median(ours)
    gigabytes = size / 1e9
    print(f"{title}: {spread(ours)} s = {gigabytes / statistics.median(ours):.2f} GB/s")
    print(f"  bare: {spread(bare)} s = {gigabytes / statistics.median(bare):.2f} GB/s")
    print(f"  ratio {ratio:.2f}, wanted {target:.1f}: {'reached' if ratio >= target else 'MISSED'}", flush=True)
    return ratio


def main() -> None:
    """See the module's docstring."""
    from megatron_rl.engines.sglang_install import find_python

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="weights, at least")
    parser.add_argument("--bucket-mib", type=int, default=32, help="engine.bucket_mib")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--unpaused", action="store_true", help="leave out the pause, in which SGLang polls")
    parser.add_argument("--engine", choices=["sglang", "embedded"], default="sglang", help="what serves")
    parser.add_argument("--python", type=Path, default=None, help="interpreter of SGLang's environment")
    parser.add_argument("--folder", type=Path, default=None, help="for files; default: a temporary one")
    words = parser.parse_args()
    python = words.python or Path(os.environ.get("MEGATRON_RL_SGLANG_PYTHON") or find_python(None))
    if words.engine == "sglang" and not python.exists():
        sys.exit(f"{python}: no SGLang there; launch/install_sglang.sh installs it")
    with tempfile.TemporaryDirectory(dir=words.folder) as name:
        folder = Path(name)
        model, size = model_of(folder / "model", words.mib)
        bucket = words.bucket_mib * MIB
        what = f"{size / 1e6:.0f} MB float32 to two servers ({words.engine}), buckets of {words.bucket_mib} MiB"
        print(f"{what}; {load_average()}", flush=True)
        bare = Bare(size, words.rounds + 1)
        with servers(words.engine, python, model, folder) as (urls, processes):
            trainer = open_trainer(model, urls, words.bucket_mib, not words.unpaused)
            sides = compare_broadcast(trainer, bare, processes, words.rounds)
            bare.close()
            ratios = {"broadcast": report("broadcast, begin to end", sides.ours, sides.bare, size, 0.8)}
            print(f"  CPU seconds of all processes: {spread(sides.our_cpu)}, bare {spread(sides.bare_cpu)}")
            print(f"  whole update with pause, checksums and continue: {spread(sides.whole)} s")
            print(f"  peak extra memory of the sender: {sides.peak / bucket:.2f} buckets (two are allowed)")
            ours, raw, peak = compare_disk(trainer, model, folder, words.bucket_mib, words.rounds)
            ratios["disk"] = report("disk, written and loaded twice", ours, raw, size, 0.7)
            print(f"  peak extra memory of the writer: {peak / bucket:.2f} buckets (two are allowed)")
            trainer.control.close()
        print(f"{load_average()}")
        print("RESULT " + json.dumps({name: round(ratio, 3) for name, ratio in ratios.items()}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
    else:
        main()
