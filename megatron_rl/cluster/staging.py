"""Copies of new weights in a node's memory, made once by its supervisor for all its engines; nobody is told here when.

    /dev/shm/megatron_rl-RUN/           RUN: made from the run's directory, so that it is the same on all nodes
        v000012/                        a version directory; it exists under this name whole, or not at all
        .copying-v000012/               being copied, or left by a crash
        .lock                           held shared by every supervisor that uses the directory
        .copy-lock                      held by the one that copies

Several supervisors of one machine, as a run without Slurm has them, share the copies. The last one to end removes the
directory. What a killed one leaves, the next start on that machine removes, of this run or another one of the user.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import psutil

from megatron_rl.files import try_lock
from megatron_rl.pins import pinned

from .run_dir import RunDir, inode
from .staged import POLL_S, Report, Request

log = logging.getLogger(__name__)
MEMORY = Path("/dev/shm")
PREFIX = "megatron_rl-"
CHUNK = 2**26
END_S = 2.0
"""How long a copy that was given up is waited for."""
_COPYING, _LOCK, _COPY_LOCK, _STAMP = ".copying-", ".lock", ".copy-lock", ".stamp"


class StageError(RuntimeError):
    """There is no copy; the message says why."""


class Stage:
    """This machine's directory of copies; use as a context manager.

    Args:
        run: whose weights.
        memory: a file system in memory.

    What is wrong with that file system is said by `copy`: a run can do without.
    """

    def __init__(self, run: RunDir, memory: Path = MEMORY) -> None:
        self._run = run
        name = hashlib.sha256(str(run.path).encode()).hexdigest()[:16]
        self.folder = memory / f"{PREFIX}{name}"
        self.copies = 0
        """How often this one has copied."""
        self._over = threading.Event()
        self._lock: IO[str] | None = None
        self._unusable: StageError | None = None

    def __enter__(self) -> Stage:
        for other in self.folder.parent.glob(f"{PREFIX}*"):
            if other != self.folder:
                _remove_unless_used(other)
        try:
            self._lock = self._hold()
        except StageError as error:
            self._unusable = error
        return self

    def __exit__(self, *_: object) -> None:
        self.give_up()
        if self._lock is not None:
            self._lock.close()
            _remove_unless_used(self.folder)

    def give_up(self) -> None:
        """Let a copy that is being made fail; from any thread."""
        self._over.set()

    def copy(self, request: Request) -> Path:
        """A copy of the version directory, made unless another supervisor of this machine has made it.

        Older versions are removed first, but those that an engine is reading: memory need hold only one. An engine that
        starts meanwhile reads the directory itself.

        Raises:
            StageError: it does not fit, cannot be read, or changed on the way; or there is no room for copies at all.
        """
        if self._unusable is not None:
            raise self._unusable
        source = Path(request.folder)
        target = self.folder / source.name
        try:
            with open(self.folder / _COPY_LOCK, "a+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if _stamp(target) != request.stamp:
                    self._replace(source, target, request.stamp)
            return target
        except OSError as error:
            raise StageError(f"{source} could not be copied to {self.folder}: {error}") from error

    def _hold(self) -> IO[str]:
        """A shared lock on the directory, which is empty when nobody else uses it."""
        while True:
            try:
                self.folder.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise StageError(f"no copies in memory: {error}") from error
            try:
                owner = self.folder.stat().st_uid
                lock = open(self.folder / _LOCK, "a+")  # noqa: SIM115 - held until the end
            except FileNotFoundError:  # removed at this moment by the last one who used it
                continue
            except OSError as error:
                raise StageError(f"no copies in memory: {error}") from error
            if owner != os.getuid():
                lock.close()
                raise StageError(f"{self.folder} belongs to another user: have it removed")
            if try_lock(lock):
                for left in self.folder.iterdir():
                    if left.is_dir():
                        shutil.rmtree(left)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if inode(lock.fileno()) == inode(self.folder / _LOCK):
                return lock
            lock.close()

    def _replace(self, source: Path, target: Path, stamp: str) -> None:
        kept = pinned(self._run.path) - {target.name}
        for old in self.folder.iterdir():
            if old.is_dir() and old.name not in kept:
                shutil.rmtree(old)
        files = [path for path in sorted(source.iterdir()) if path.is_file() and not path.name.startswith(".")]
        size = sum(path.stat().st_size for path in files)
        self._require_room(source, size)
        copying = self.folder / f"{_COPYING}{target.name}"
        copying.mkdir()
        try:
            for file in files:
                self._copy_file(file, copying / file.name)
            (copying / _STAMP).write_text(stamp)
            copying.rename(target)
        except BaseException:
            shutil.rmtree(copying)
            raise
        self.copies += 1
        log.info("copied %s to %s, %.1f MiB", source, target, size / 2**20)

    def _require_room(self, source: Path, needed: int) -> None:
        for what, free in (
            (f"{self.folder.parent} has room for", shutil.disk_usage(self.folder).free),
            ("the machine has memory for", psutil.virtual_memory().available),
        ):
            if needed > free:
                raise StageError(
                    f"{source} takes {needed / 2**30:.2f} GiB, and {what} {free / 2**30:.2f} GiB: make room, or set "
                    "engine.stage_in_memory=false"
                )

    def _copy_file(self, source: Path, target: Path) -> None:
        with open(source, "rb") as reader, open(target, "wb") as writer:
            size, done = os.fstat(reader.fileno()).st_size, 0
            while sent := os.sendfile(writer.fileno(), reader.fileno(), done, CHUNK):
                done += sent
                if self._over.is_set():
                    raise StageError("the supervisor ends")
        if done != size or target.stat().st_size != size:
            raise StageError(f"{source}: {done} of {size} bytes were copied; was it changed meanwhile?")


@contextlib.contextmanager
def carry_out_requests(stage: Stage, run: RunDir, report: Report, name: str) -> Iterator[None]:
    """Within the block, a thread copies what the trainer asks for. `report`: of this node, saved under `name`."""
    over = threading.Event()

    def carry_out() -> None:
        done: str | None = None
        while not over.wait(POLL_S):
            request = Request.read(run.staged)
            if request is not None and request.stamp != done:
                done = request.stamp
                _carry_out(stage, request, report).write(run.staged, name)

    report.write(run.staged, name)
    thread = threading.Thread(target=carry_out, name="staging", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        stage.give_up()
        thread.join(END_S)


def _carry_out(stage: Stage, request: Request, report: Report) -> Report:
    try:
        return replace(report, stamp=request.stamp, path=str(stage.copy(request)))
    except StageError as failure:
        log.warning("%s", failure)
        return replace(report, stamp=request.stamp, error=str(failure))


def _stamp(copy: Path) -> str | None:
    try:
        return (copy / _STAMP).read_text()
    except FileNotFoundError:
        return None


def _remove_unless_used(folder: Path) -> None:
    """Remove a directory of copies that no living process uses; leave what is another user's."""
    with contextlib.suppress(OSError):
        if folder.stat().st_uid != os.getuid():
            return
        with open(folder / _LOCK, "a+") as lock:
            if try_lock(lock):
                shutil.rmtree(folder)
