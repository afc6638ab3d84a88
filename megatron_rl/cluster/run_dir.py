"""The run directory: where each thing of a run lies, and the lock that keeps two runs apart. No format is known here.

config.yaml  metrics.jsonl  result.json  report.html
rollouts/  eval/  tensorboard/  checkpoints/  weights/  logs/  endpoints/
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RunDirError(RuntimeError):
    """The run directory cannot be used as asked; the message says what to do."""


class RunDir:
    """Paths below one run's directory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def endpoints(self) -> Path:
        return self.path / "endpoints"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, role: str, rank: int) -> Path:
        """Log file of one process."""
        return self.logs / f"{role}-{rank}.log"

    def engine_endpoint(self, replica: int) -> Path:
        """File in which a started engine publishes its address."""
        return self.endpoints / f"engine-{replica}.json"

    def prepare(self, resume: bool) -> None:
        """Create the directories; refuse to run over an earlier run unless it is to be resumed.

        Raises:
            RunDirError: an earlier run lies there, or the directory cannot be written.
        """
        if self.metrics.exists() and not resume:
            raise RunDirError(
                f"run_dir={self.path} holds an earlier run; add --resume to go on with it, or choose another"
            )
        try:
            for folder in (self.path, self.endpoints, self.weights, self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            for stale in self.endpoints.glob("*.json"):
                stale.unlink()
        except OSError as error:
            raise RunDirError(f"run_dir={self.path} cannot be written: {error}; choose another run_dir") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory for one run. Raises RunDirError naming the owner and since when it runs."""
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / ".lock", "a+") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                raise RunDirError(
                    f"run_dir={self.path} is in use by {_owner(handle.read())}; choose another run_dir"
                ) from None
            handle.truncate(0)
            handle.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}))
            handle.flush()
            yield


def _owner(text: str) -> str:
    try:
        owner = json.loads(text)
    except json.JSONDecodeError:
        return "another run"
    return f"process {owner['pid']} on {owner['host']}, running for {(time.time() - owner['since']) / 60:.0f} min"
