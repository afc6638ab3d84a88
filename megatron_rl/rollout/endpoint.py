"""Where the controller can be reached: RUN/endpoints/controller.json, and the engines' files beside it.

The file is written after the port is bound, whole, and readable by its owner only, since it holds the token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.files import write_atomic

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
    return write_atomic(controller_file(run_dir), json.dumps(asdict(endpoint)), mode=0o600)


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
    files = [_engine_file(run_dir, i) for i in range(replicas)]
    deadline = time.monotonic() + timeout_s
    while missing := [str(f) for f in files if not f.exists()]:
        if time.monotonic() >= deadline:
            raise TimeoutError(
                f"waited {timeout_s:g} s (engine.ready_timeout_s) for engines to publish {', '.join(missing)}; "
                "look at RUN/logs/engine-*.log"
            )
        sleep(POLL_S)
    return [str(json.loads(f.read_text())["url"]) for f in files]


def engine_logs(run_dir: str | Path, urls: Sequence[str]) -> dict[str, Path]:
    """Where the engines at `urls`, of which the run started number i at place i, write their logs.

    Empty for servers that run elsewhere: they have published nothing here.
    """
    logs = Path(run_dir) / "logs"
    return {url: logs / f"engine-{i}.log" for i, url in enumerate(urls) if _engine_file(run_dir, i).exists()}


def engine_pids(run_dir: str | Path, urls: Sequence[str]) -> dict[str, int]:
    """Process ids of the engines at `urls`, as `engine_logs`: one that was started again has another."""
    found = {}
    for i, url in enumerate(urls):
        try:
            found[url] = int(json.loads(_engine_file(run_dir, i).read_text())["pid"])
        except FileNotFoundError:  # it is being started, or none of the run's
            continue
    return found


def _engine_file(run_dir: str | Path, replica: int) -> Path:
    return Path(run_dir) / "endpoints" / f"engine-{replica}.json"
