"""Where the controller can be reached: RUN/endpoints/controller.json, and the engines' files beside it.

The file is written after the port is bound, whole, and readable by its owner only, since it holds the token.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.config import Config
from megatron_rl.files import write_atomic

log = logging.getLogger(__name__)
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


def engine_urls(cfg: Config, sleep: Callable[[float], None] = time.sleep) -> list[str]:
    """`engine.urls`, or where the run's own engines are: RUN/endpoints/engine-<i>.json, published when they serve.

    With `one_engine_is_enough`, when one serves, those that do not after `engine.ready_timeout_s`, or have failed, are
    not waited for: their place is taken by the address where their supervisor will have them serve.

    Raises:
        TimeoutError: none, or not all, have published in time; the message names the missing files.
    """
    if cfg.engine.urls:
        return list(cfg.engine.urls)
    run_dir, replicas, timeout_s = cfg.run_dir, cfg.engine.replicas, cfg.engine.ready_timeout_s
    deadline = time.monotonic() + timeout_s
    files = [_file(run_dir, "engine", i) for i in range(replicas)]
    while missing := [i for i, file in enumerate(files) if not file.exists()]:
        late = time.monotonic() >= deadline
        failed = all(_file(run_dir, "failed", i).exists() for i in missing)
        if cfg.one_engine_is_enough and len(missing) < replicas and (late or failed):
            addresses = {i: _file(run_dir, "address", i) for i in missing}
            if all(address.exists() for address in addresses.values()):
                log.error("engines %s do not serve; going on with the others; look at RUN/logs/engine-*.log", missing)
                files = [addresses.get(i, file) for i, file in enumerate(files)]
                break
        if late:
            raise TimeoutError(
                f"waited {timeout_s:g} s (engine.ready_timeout_s) for engines to publish "
                f"{', '.join(str(files[i]) for i in missing)}; look at RUN/logs/engine-*.log"
            )
        sleep(POLL_S)
    return [str(json.loads(file.read_text())["url"]) for file in files]


def engine_logs(run_dir: str | Path, urls: Sequence[str]) -> dict[str, Path]:
    """Where the engines at `urls`, of which the run started number i at place i, write their logs.

    Empty for servers that run elsewhere: they have published nothing here.
    """
    logs = Path(run_dir) / "logs"
    ours = [i for i in range(len(urls)) if any(_file(run_dir, kind, i).exists() for kind in ("address", "engine"))]
    return {urls[i]: logs / f"engine-{i}.log" for i in ours}


def engine_pids(run_dir: str | Path, urls: Sequence[str]) -> dict[str, int]:
    """Process ids of the engines at `urls`, as `engine_logs`: one that was started again has another."""
    found = {}
    for i, url in enumerate(urls):
        try:
            found[url] = int(json.loads(_file(run_dir, "engine", i).read_text())["pid"])
        except FileNotFoundError:  # it is being started, or none of the run's
            continue
    return found


def _file(run_dir: str | Path, kind: str, replica: int) -> Path:
    """`engine`: published when it serves; `address`: where it will; `failed`: there while it does not (`cluster`)."""
    return Path(run_dir) / "endpoints" / f"{kind}-{replica}.json"
