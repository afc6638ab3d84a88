"""A verifier that the tests of this folder name in a configuration."""

from __future__ import annotations

import subprocess
from typing import Any


def leaves_a_child(response: str, record: Any, seconds: int) -> float:
    """Starts a process that leaves its session, its parent and its environment, as a careless sandbox would."""
    subprocess.run(["sh", "-c", f"setsid env -i sleep {seconds} >/dev/null 2>&1 </dev/null &"], check=True)
    return float(len(response) % 2)
