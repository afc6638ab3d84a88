"""Ends every process of one session when whoever started this program has ended, however that came.

    python guard.py        reads the number of a session, then waits for the end of its standard input

A server of many processes is started in a session of its own. Its launcher holds the other end of the pipe: when the
launcher is gone, killed or not, the pipe closes. Standard library only: it must start in a moment, and stays for long.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

ROUNDS, PAUSE_S = 200, 0.05
LEFT_BEHIND = "/dev/shm/sglang_loads_"
"""How files begin that SGLang makes for each server and does not remove. The name does not say whose they are."""


def members(session: int) -> list[int]:
    """Ids of the processes of `session` that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                state, _, _, theirs = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(theirs) == session and state != "Z":
                    found.append(int(entry.name))
    return found


def shared_files(session: int) -> set[str]:
    """Those of `LEFT_BEHIND` that a process of `session` has mapped."""
    found = set()
    for pid in members(session):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if LEFT_BEHIND in line:
                    found.add(line[line.index(LEFT_BEHIND) :])
    return found


def remove(files: set[str]) -> None:
    """Nobody uses them any more."""
    for file in files:
        with suppress(OSError):
            os.unlink(file)


def end_session(session: int) -> None:
    """KILL to every process of `session` until none is left: they may be forking. Some may not go for ten seconds."""
    files = shared_files(session)
    for _ in range(ROUNDS):
        pids = members(session)
        if not pids:
            break
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_S)
    remove(files)


def main() -> None:
    """See above."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they come to whole process groups
    session = sys.stdin.readline().strip()
    sys.stdin.read()
    if session:
        end_session(int(session))


if __name__ == "__main__":
    main()
