"""What benchmarks share: the load of the machine, peak memory of processes, medians, engines; it measures no side."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from megatron_rl.cluster.processes import die_with_parent

ROOT = Path(__file__).resolve().parent.parent
POLL_S, START_S = 0.3, 300.0


class BenchError(RuntimeError):
    """A side of the comparison could not be run; the message holds the end of its output."""


def load_average() -> str:
    """The machine's load, which decides what a number is worth."""
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`median (smallest .. largest)`."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


@dataclass(frozen=True)
class Engine:
    """An embedded engine that answers."""

    url: str
    process: psutil.Process

    def cpu_seconds(self) -> float:
        """Used so far, all threads."""
        times = self.process.cpu_times()
        return times.user + times.system


@contextmanager
def running_engines(model: Path, folder: Path, count: int, *words: str) -> Iterator[list[Engine]]:
    """Embedded engines in fp32, in processes of their own, which end with the block or with this process.

    Raises:
        BenchError: one does not answer; with the end of its output.
    """
    with contextlib.ExitStack() as stack:
        places = [folder / f"engine-{i}" for i in range(count)]
        started = [stack.enter_context(_started(model, place, words)) for place in places]
        deadline = time.monotonic() + START_S
        yield [await_engine(place, process, deadline) for place, process in zip(places, started, strict=True)]


@contextmanager
def _started(model: Path, place: Path, words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "megatron_rl.engines.serve", "--model", str(model), "--dtype", "float32"]
    command += ["--endpoint-file", str(place.with_suffix(".json")), *words]
    with place.with_suffix(".log").open("wb") as output:
        orphan = functools.partial(die_with_parent, signal.SIGTERM)
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, preexec_fn=orphan)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


def await_engine(place: Path, process: subprocess.Popen[bytes], deadline: float) -> Engine:
    """An engine that publishes its address in PLACE.json and logs to PLACE.log. Raises BenchError."""
    endpoint = place.with_suffix(".json")
    while not endpoint.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            said = place.with_suffix(".log").read_text()[-2000:]
            raise BenchError(f"an engine does not answer after {START_S:.0f} s:\n{said}")
        time.sleep(0.1)
    return Engine(str(json.loads(endpoint.read_text())["url"]), psutil.Process(process.pid))


@dataclass
class Usage:
    """What a command and all its children have used."""

    peak_gib: float = 0.0
    """Most memory at once; shared pages count once (proportional set size)."""
    times: list[float] = field(default_factory=list)
    """Seconds since the epoch, rising, at which `cpu_seconds` was looked at."""
    cpu_seconds: list[float] = field(default_factory=list)

    def cpu_between(self, start: float, end: float) -> float:
        """CPU seconds used between two times, interpolated."""
        before, after = np.interp([start, end], self.times, self.cpu_seconds)
        return float(after - before)


def run(command: Sequence[str], log: Path, threads: int, timeout_s: float) -> Usage:
    """Run a command with `threads` threads a process.

    Raises:
        BenchError: it failed, or took too long.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(list(command), stdout=output, stderr=subprocess.STDOUT, env=environment)
        watch = _Watch(process.pid)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait(60)
            raise BenchError(f"{command[0]} took more than {timeout_s:.0f} s; see {log}") from None
        finally:
            watch.stop()
    if code:
        raise BenchError(f"exit code {code}: {' '.join(command)}\n{log.read_text(errors='replace')[-3000:]}")
    return watch.usage


class _Watch:
    """Polls a process and its descendants in a thread."""

    def __init__(self, pid: int) -> None:
        self.usage = Usage()
        self._root, self._stopped = psutil.Process(pid), threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._stopped.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        memory, cpu = 0, 0.0
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return
        for process in processes:
            try:
                memory += process.memory_full_info().pss
                times = process.cpu_times()
                cpu += times.user + times.system
            except psutil.Error:
                continue  # ended meanwhile
        self.usage.peak_gib = max(self.usage.peak_gib, memory / 2**30)
        self.usage.times.append(time.time())
        self.usage.cpu_seconds.append(cpu)
