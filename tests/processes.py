"""Waiting for processes and for what they do, with a deadline; holds no tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def has_ended(pid: int) -> bool:
    """Whether it is gone, or waits for its parent to take note of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Look again and again; fails at the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.02)
