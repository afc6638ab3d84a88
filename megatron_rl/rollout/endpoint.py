"""Where the controller can be reached: RUN/endpoints/controller.json, and the engines' files beside it.

The file is written after the port is bound, whole, and readable by its owner only, since it holds the token.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

POLL_S = 0.1


@dataclass(frozen=True)
class Endpoint:
    """Address and bearer token of one controller."""

    url: str
    pid: int
    token: str


def controller_file(run_dir: str | Path) -> Path:
    """RUN/endpoints/controller.json."""
    return Path(run_dir) / "endpoints" / "controller.json"


def publish(run_dir: str | Path, endpoint: Endpoint) -> Path:
    """Write the file atomically with mode 0600."""
    path = controller_file(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as file:
        json.dump(asdict(endpoint), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path


def read(run_dir: str | Path) -> Endpoint | None:
    """The published endpoint, or None when there is none (yet)."""
    try:
        return Endpoint(**json.loads(controller_file(run_dir).read_text()))
    except FileNotFoundError:
        return None


def engine_urls(
    run_dir: str | Path, replicas: int, timeout_s: float, sleep: Callable[[float], None] = time.sleep
) -> list[str]:
    """Addresses of the engines that the run started, from RUN/endpoints/engine-<i>.json.

    Raises:
        TimeoutError: not all have published after `timeout_s`; the message names the missing files.
    """
    files = [Path(run_dir) / "endpoints" / f"engine-{i}.json" for i in range(replicas)]
    deadline = time.monotonic() + timeout_s
    while missing := [str(f) for f in files if not f.exists()]:
        if time.monotonic() >= deadline:
            raise TimeoutError(
                f"waited {timeout_s:g} s (engine.ready_timeout_s) for engines to publish {', '.join(missing)}; "
                "look at RUN/logs/engine-*.log"
            )
        sleep(POLL_S)
    return [str(json.loads(f.read_text())["url"]) for f in files]
