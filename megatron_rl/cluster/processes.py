"""Starting, watching and ending one role's process. Which roles a run has is decided in `local.py`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)
PR_SET_PDEATHSIG = 1
NEARLY_FULL = 16 * 2**20
"""Free bytes below which a failure is put down to the disk as well; the log may have had no room for it."""
QUIET = ("-W", "ignore::UserWarning", "-W", "ignore::FutureWarning")
"""For trainer ranks: Megatron warns at length about what a CPU lacks, and an error must not drown in it."""
EXIT_RESUMABLE = 75
"""EX_TEMPFAIL: the run saved itself and wants to be started again."""


class Signalled:
    """These signals to this process, from the moment it is made: remembered for loops that look at it."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self.at: float | None = None
        """When the first one came, time.monotonic()."""
        for number in numbers:
            signal.signal(number, self._receive)

    @property
    def age_s(self) -> float:
        """Seconds since the first one; 0 without one."""
        return 0.0 if self.at is None else time.monotonic() - self.at

    def _receive(self, number: int, _: object) -> None:
        log.info("got %s", signal.Signals(number).name)
        self.at = self.at or time.monotonic()


@dataclass
class Role:
    """One running process of the run."""

    name: str
    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int = 0
    """Bytes that earlier starts of the run had left in the log."""
    stop_signal: signal.Signals = signal.SIGTERM
    """What asks it to end."""

    def describe_exit(self) -> str:
        """What its exit code means, and the end of its log; on a full disk, why the reason may be missing."""
        end = tail(self.log, start=self.log_start)
        words = f"{self.name}-{self.rank} {decode_exit(self.process.returncode)}; log {self.log}\n{end}"
        try:
            free = shutil.disk_usage(self.log.parent).free
        except OSError as error:
            return f"{words}\nthe run's directory was taken away meanwhile ({error}); leave it where it is"
        if free < NEARLY_FULL:
            words += (
                f"\nonly {free / 2**20:.1f} MiB are free in {self.log.parent}, where the reason should stand; make "
                "room there, or choose another run_dir"
            )
        return words


def start(
    name: str,
    rank: int,
    argv: list[str],
    env: dict[str, str],
    log_file: Path,
    *,
    console: bool = False,
    lock: int | None = None,
    stop_signal: signal.Signals = signal.SIGTERM,
    orphan_signal: signal.Signals | None = None,
) -> Role:
    """Start a process that dies with its parent; stderr, and stdout unless it owns the console, go to `log_file`.

    Args:
        lock: file descriptor that the process keeps open, so that what it locks stays locked while the process lives.
        stop_signal: what `stop` sends it first.
        orphan_signal: what the kernel sends it when the launcher dies, however the launcher dies; None: `stop_signal`.
    """
    with open(log_file, "ab") as handle:
        log_start = handle.tell()
        stdout: IO[bytes] | None = None if console else handle
        process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=handle,
            start_new_session=True,
            pass_fds=() if lock is None else (lock,),
            preexec_fn=functools.partial(die_with_parent, orphan_signal or stop_signal),
        )
    return Role(name, rank, process, log_file, log_start, stop_signal)


def die_with_parent(number: signal.Signals) -> None:
    """In a child before exec: the kernel sends it this signal when its parent dies, however that dies."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)


def stop(roles: list[Role], timeout_s: float) -> None:
    """Ask all to end, then KILL to what is left after the timeout."""
    for role in roles:
        _signal(role, role.stop_signal)
    deadline = time.monotonic() + timeout_s
    for role in roles:
        try:
            role.process.wait(max(0.05, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal(role, signal.SIGKILL)
            role.process.wait()


def kill(roles: list[Role]) -> None:
    """KILL to all, at once."""
    for role in roles:
        _signal(role, signal.SIGKILL)


def _signal(role: Role, number: int) -> None:
    """Signal the role's whole process group: its own children end with it."""
    if role.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(role.process.pid, number)


def decode_exit(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "still runs"
    if code == 0:
        return "ended"
    if code == EXIT_RESUMABLE:
        return "saved itself and can be resumed (exit 75)"
    number = -code if code < 0 else code - 128
    if number in (s.value for s in signal.Signals):
        reason = " (out of memory? see `dmesg`)" if number == signal.SIGKILL else ""
        return f"was ended by {signal.Signals(number).name}{reason}"
    return f"failed with exit code {code}"


def tail(file: Path, lines: int = 25, start: int = 0) -> str:
    """The last lines of a log file, of what was written behind byte `start`."""
    try:
        with open(file, "rb") as handle:
            handle.seek(max(start, file.stat().st_size - 65536))
            text = handle.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join("    " + line for line in text.splitlines()[-lines:])
