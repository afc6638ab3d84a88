"""What both benchmarks share: the load of the machine, peak memory of processes, medians; it measures neither side."""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

POLL_S = 0.3


class BenchError(RuntimeError):
    """A side of the comparison could not be run; the message holds the end of its output."""


def load_average() -> str:
    """The machine's load, which decides what a number is worth."""
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`median (smallest .. largest)`."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


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
