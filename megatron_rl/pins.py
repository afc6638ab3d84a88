"""Version directories that an engine which starts has begun to read: nobody may remove them. For every room.

    RUN/endpoints/loading-<replica>.json     the directory's name, and the process that reads it

A pin holds until that very process has published its address. An engine may need longer to start than a few steps take:
it then comes up with old weights, which is put right, and not with none.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from megatron_rl.files import write_atomic


def pin(run_dir: Path, replica: int, name: str) -> None:
    """Keep the version directory of this name, and copies of it, until this process has published its address."""
    write_atomic(run_dir / "endpoints" / f"loading-{replica}.json", json.dumps({"name": name, "pid": os.getpid()}))


def pinned(run_dir: Path) -> set[str]:
    """Names of the version directories that are being read."""
    found = set()
    for path in (run_dir / "endpoints").glob("loading-*.json"):
        pin = _read(path)
        if (
            pin is not None
            and (_read(path.with_name(path.name.replace("loading", "engine"))) or {}).get("pid") != pin["pid"]
        ):
            found.add(str(pin["name"]))
    return found


def _read(path: Path) -> dict[str, object] | None:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
