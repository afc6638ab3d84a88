"""The run directory: where each thing of a run lies, and the lock that keeps two runs apart. No format is known here.

config.yaml  metrics.jsonl  ledger.jsonl  result.json  report.html
rollouts/  eval/  tensorboard/  checkpoints/  weights/  routes/  logs/  endpoints/
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megatron_rl.config.engine import KEY_FILE
from megatron_rl.files import try_lock, write_atomic


class RunDirError(RuntimeError):
    """The run directory cannot be used as asked; the message says what to do. Nothing was started."""


class RunMoved(RunDirError):
    """It went away while processes of the run wrote to it, which ended them."""


class RunDir:
    """Paths below one run's directory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.endpoints = self.path / "endpoints"
        self.weights = self.path / "weights"
        self.staged = self.weights / "staged"
        """What trainer and engine nodes tell each other about copies of weights in memory."""
        self.routes = self.path / "routes"
        """Routes of experts, of the samples that are alive; see `megatron_rl.routes`."""
        self.checkpoints = self.path / "checkpoints"
        self.result = self.path / "result.json"
        """There when all steps were taken; removed when the run goes on."""
        self.report = self.path / "report.html"
        """Written in the course of a run, and again after its result."""
        self.logs = self.path / "logs"
        self._lock_file = self.path / ".lock"

    def log(self, role: str, rank: int) -> Path:
        """Log file of one process."""
        return self.logs / f"{role}-{rank}.log"

    def engine_endpoint(self, replica: int) -> Path:
        """File in which a started engine publishes its address."""
        return self.endpoints / f"engine-{replica}.json"

    def engine_address(self, replica: int) -> Path:
        """File that says where an engine is going to serve, there from before its first start."""
        return self.endpoints / f"address-{replica}.json"

    def engine_failure(self, replica: int) -> Path:
        """Is there while an engine does not serve because it failed; see `cluster.fellows`."""
        return self.endpoints / f"failed-{replica}.json"

    def prepare(self, resume: bool) -> None:
        """Create the directories and the engines' key; refuse to run over an earlier run unless it is to be resumed.

        Raises:
            RunDirError: an earlier run lies there, or the directory cannot be written.
        """
        if self.metrics.exists() and not resume:
            raise RunDirError(
                f"run_dir={self.path} holds an earlier run; add --resume to go on with it, or choose another"
            )
        with self._writable():
            for folder in (self.path, self.endpoints, self.weights, self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            stale = [*self.endpoints.glob("*.json"), *self.staged.glob("*.json")]
            for path in [*stale, self.weights / "current.json", self.result]:
                path.unlink(missing_ok=True)
            write_atomic(self.path / KEY_FILE, secrets.token_hex(32), mode=0o600)

    def write_config(self, text: str) -> None:
        """Replace `config.yaml`. Raises RunDirError when the directory cannot be written."""
        with self._writable():
            write_atomic(self.config, text)

    @contextmanager
    def _writable(self) -> Iterator[None]:
        """Turns what the file system refuses into a RunDirError."""
        try:
            yield
        except OSError as error:
            raise RunDirError(f"run_dir={self.path} cannot be written: {error}; choose another run_dir") from error

    @contextmanager
    def locked(self, patience_s: float = 0.0) -> Iterator[int]:
        """Hold the directory for one run, and give the descriptor of the lock.

        Processes that inherit the descriptor hold the directory too: when the launcher is killed, nobody takes over
        before the last of them has ended, for which this waits up to `patience_s`.

        Raises:
            RunDirError: naming the owner and since when it runs; or the directory cannot be written.
        """
        with self._writable():
            made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            with self._lock(time.monotonic() + patience_s) as handle:
                with self._writable():
                    handle.truncate(0)
                    handle.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}))
                    handle.flush()
                yield handle.fileno()
        except BaseException:
            if made:
                self._remove_empty(made)
            raise

    def _lock(self, deadline: float) -> IO[str]:
        while True:
            with self._writable():
                self.path.mkdir(parents=True, exist_ok=True)
                handle = open(self._lock_file, "a+")  # noqa: SIM115 - what runs while it is open must not be translated
            while not try_lock(handle):
                owner = _owner(handle)
                if not _is_gone(owner) or time.monotonic() > deadline:
                    handle.close()
                    raise RunDirError(f"run_dir={self.path} is in use by {_describe(owner)}; choose another run_dir")
                time.sleep(0.05)
            if inode(handle.fileno()) == inode(self._lock_file):
                return handle
            handle.close()  # whoever had it has removed it

    def _remove_empty(self, made: Sequence[Path]) -> None:
        """After a refusal: directories that were made for the lock, if it is all that they hold."""
        with contextlib.suppress(OSError):
            if [path.name for path in self.path.iterdir()] == [self._lock_file.name]:
                self._lock_file.unlink()
                for path in made:
                    path.rmdir()


class Anchor:
    """Where a run's directory lies while the run holds it: processes write to its path, wherever it was moved."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._inode = run, inode(run.path / ".lock")

    def require(self) -> None:
        """Raise RunMoved when the directory is no longer at its path."""
        if inode(self._run.path / ".lock") != self._inode:
            raise RunMoved(
                f"run_dir={self._run.path} was moved, renamed or removed while the run went on, which ends it; move it "
                "back (or set run_dir to where it is now), and go on with --resume"
            )


def inode(file: Path | int) -> tuple[int, int] | None:
    """What tells a file from any other with its name; None when there is none."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _owner(handle: IO[str]) -> dict[str, Any] | None:
    handle.seek(0)
    try:
        return dict(json.loads(handle.read()))
    except json.JSONDecodeError:
        return None


def _is_gone(owner: dict[str, Any] | None) -> bool:
    """The launcher has ended although the directory is held: by its own last processes."""
    if owner is None or owner["host"] != socket.gethostname():
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _describe(owner: dict[str, Any] | None) -> str:
    if owner is None:
        return "another run"
    age = f"running for {(time.time() - owner['since']) / 60:.0f} min"
    name = f"process {owner['pid']} on {owner['host']}, {age}"
    return f"processes that outlived their launcher ({name})" if _is_gone(owner) else name
