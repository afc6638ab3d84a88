"""A run that still goes on: its processes by role, what it has written so far, signals to them. No tests here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from .runs import environment, train_command

PATIENCE_S = 240.0


class LiveRun:
    """`megatron-rl train` in the background. Use as a context manager: what is left of it is killed at the end."""

    def __init__(self, folder: Path, inputs: Path, *words: str) -> None:
        self.folder, self._began = folder, time.time()
        self._log = folder.with_name(folder.name + ".output")
        command = train_command(folder, inputs, *words)
        with open(self._log, "wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment())

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def output(self) -> str:
        """What it has said on the terminal."""
        return self._log.read_text()

    def pid(self, role: str, rank: int = 0) -> int:
        """Process id of launcher, trainer, controller, supervisor, engine or reward worker, once it is there."""
        if role == "launcher":
            return self.process.pid
        found: list[int] = []

        def look() -> bool:
            if role == "reward worker":
                found[:] = [child.pid for child in psutil.Process(self.pid("controller")).children()][rank:]
            else:
                found[:] = [pid for pid, words in processes_of(self.folder) if _role(pid, words) == (role, rank)]
            return bool(found)

        self.wait_until(f"a process {role}-{rank}", look)
        return found[0]

    @property
    def doing(self) -> str:
        """What the run is at, as far as its files tell."""
        done = max((row["step"] for row in self._new_rows if "policy/loss" in row), default=None)
        if done is None:
            return "starting"
        if self.is_saving:
            return f"saving step {done}"
        if (self.folder / "weights" / f"v{done + 1:06d}").exists():
            return f"publishing or evaluating step {done + 1}"
        return f"sampling or training step {done + 1}"

    @property
    def is_saving(self) -> bool:
        """Tensors of a checkpoint are being written; what an earlier start left behind does not count."""
        try:
            files = (self.folder / "checkpoints").glob(".tmp-step-*/policy/*")
            return any(file.stat().st_mtime >= self._began for file in files)
        except FileNotFoundError:  # renamed meanwhile: it is saved
            return False

    @property
    def _new_rows(self) -> list[dict[str, Any]]:
        return [row for row in rows(self.folder) if row["time"] >= self._began]

    def wait_for_step(self, step: int) -> None:
        """Until this start has written the row of RL step `step`, or of a later one."""
        self.wait_until(f"step {step}", lambda: any(row["step"] >= step for row in self._new_rows))

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        """Poll; fails when the run ends or `PATIENCE_S` pass before."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what}:\n{self.output}"
            time.sleep(0.002)

    def send(self, number: signal.Signals, role: str, rank: int = 0) -> None:
        """A signal to one process."""
        os.kill(self.pid(role, rank), number)

    def send_to_all(self, number: signal.Signals) -> None:
        """A signal to every process of the run, the launcher last, as a service manager may send it."""
        launcher = psutil.Process(self.process.pid)
        for process in [*launcher.children(recursive=True)[::-1], launcher]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def end(self) -> int:
        """Wait for the launcher, and until no process of the run is left. Returns the exit code."""
        code = self.process.wait(PATIENCE_S)
        deadline = time.monotonic() + 60
        while left := processes_of(self.folder):
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.05)
        return code


def processes_of(folder: Path) -> list[tuple[int, list[str]]]:
    """Process ids and command lines that name this run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if any(str(folder) in word for word in words) and int(entry.name) != os.getpid():
            found.append((int(entry.name), words))
    return found


def _role(pid: int, words: list[str]) -> tuple[str, int]:
    if "megatron_rl.train" in words:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return "trainer", next((int(v[5:]) for v in variables if v.startswith(b"RANK=")), -1)
    if "rollout" in words:
        return "controller", 0
    if "serve" in words:
        return "engine" if "--unsupervised" in words else "supervisor", int(words[words.index("--replica") + 1])
    return "launcher", 0


def rows(folder: Path) -> list[dict[str, Any]]:
    """Whole rows of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def exact_metrics(folder: Path) -> dict[tuple[int, float], dict[str, str]]:
    """`repr` of every metric but times and the state of the machine, by step and step of the warm-up."""
    found: dict[tuple[int, float], dict[str, str]] = {}
    for row in rows(folder):
        place = found.setdefault((row["step"], row.get("sft/step", 0)), {})
        kept = {
            name: repr(v) for name, v in row.items() if name != "time" and not name.startswith(("time/", "system/"))
        }
        assert not (place.keys() & kept.keys()) - {"step"}, f"step {row['step']} stands twice in {folder}"
        place.update(kept)
    return found
