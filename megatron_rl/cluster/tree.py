"""Ending a process with everything that it has started, whatever state they are in; nothing is decided here."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from megatron_rl.tags import all_pids, descendants

ROUNDS, PAUSE_S = 200, 0.05


def kill_tree(pid: int) -> list[int]:
    """KILL to a child of ours, all that descend from it, and whoever shares a session that one of them began.

    A stopped process ends too. Waits until none is left, ten seconds at most: the memory of a device must be free
    before a successor wants it.

    Returns:
        Who would not go: a process that a driver or a file system holds.
    """
    doomed = {pid, *descendants(pid)}
    sessions = {pid for pid in doomed if _session(pid) == pid}
    for _ in range(ROUNDS):
        doomed |= {other for other in all_pids() if _session(other) in sessions}  # they may be forking
        left = [one for one in doomed if _session(one) is not None]
        if not left:
            return []
        for one in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        time.sleep(PAUSE_S)
    return left


def _session(pid: int) -> int | None:
    """None for a process that has ended."""
    try:
        state, _, _, session, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(session)
