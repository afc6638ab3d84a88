"""New weights in the memory of the engine nodes, as the trainer sees it: it asks for copies and learns where they are.

    RUN/weights/staged/request.json     written by the trainer: which directory, under which stamp
    RUN/weights/staged/NODE.json        written by that node's supervisor (`staging.py`): where its copy is, or why not

Waits for: a report with the stamp of the request from every node, half of `engine.update_timeout_s` at most. A node
that is late or could not copy costs no step: its engines read the directory itself.
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

from .run_dir import RunDir

log = logging.getLogger(__name__)
REQUEST = "request.json"
POLL_S = 0.2


@dataclass(frozen=True)
class Request:
    """A version directory that is to be copied; `stamp` tells two apart that have the same name."""

    folder: str
    stamp: str

    @classmethod
    def to_copy(cls, folder: Path) -> Request:
        """Of the directory as it is now: asked for again, it needs no second copy, unless it was written anew."""
        written = (folder / "config.json").stat()
        return cls(str(folder), f"{folder.name}-{written.st_ino}-{written.st_mtime_ns}")

    def write(self, reports: Path) -> None:
        """Replace the request before it."""
        write_atomic(reports / REQUEST, json.dumps(asdict(self)))

    @classmethod
    def read(cls, reports: Path) -> Request | None:
        """The newest request, None when there was none."""
        try:
            return cls(**json.loads((reports / REQUEST).read_text()))
        except FileNotFoundError:
            return None


@dataclass(frozen=True)
class Report:
    """What one supervisor says.

    Attributes:
        node: its name.
        replicas: which of the run's engines it runs, or its part of them.
        stamp: of the request that it has carried out; None at its start.
        path: its copy; None when there is none.
        error: why there is none.
    """

    node: str
    replicas: list[int]
    stamp: str | None = None
    path: str | None = None
    error: str | None = None

    def write(self, reports: Path, name: str) -> None:
        """Replace the report before it, which has the same name."""
        write_atomic(reports / f"{name}.json", json.dumps(asdict(self)))


def read_reports(reports: Path) -> list[Report]:
    """Those of all supervisors."""
    files = [path for path in sorted(reports.glob("*.json")) if path.name != REQUEST]
    return [Report(**json.loads(path.read_text())) for path in files]


def staged_paths(
    cfg: Config, folder: str | Path, interrupted: Callable[[], bool] = lambda: False, poll_s: float = POLL_S
) -> dict[str, str]:
    """Have every engine node copy `folder` into its memory, and wait for it. By rank 0 alone, after the announcement.

    Nodes that have a copy already keep it.

    Returns:
        The copy by URL of the engine. An engine that is missing here reads `folder` itself; why, the log says.
    """
    run, engine = RunDir(cfg.run_dir), cfg.engine
    request, timeout_s = Request.to_copy(Path(folder)), engine.update_timeout_s / 2
    request.write(run.staged)
    deadline = time.monotonic() + timeout_s
    wanted = [replica for replica in range(engine.replicas) for _ in range(engine.nodes_per_replica)]
    while True:
        reports = read_reports(run.staged)
        done = [report for report in reports if report.stamp == request.stamp]
        if sorted(replica for report in done for replica in report.replicas) == wanted or interrupted():
            break
        if time.monotonic() > deadline:
            log.warning("%s", _late(folder, reports, request, engine.replicas, timeout_s))
            break
        time.sleep(poll_s)
    for report in done:
        if report.error:
            log.warning("node %s: %s; its engines read %s itself", report.node, report.error, folder)
    return _by_url(run, done, engine.replicas, engine.nodes_per_replica)


def _late(folder: str | Path, reports: Sequence[Report], request: Request, replicas: int, timeout_s: float) -> str:
    late = [report.node for report in reports if report.stamp != request.stamp]
    known = {replica for report in reports for replica in report.replicas}
    late += [f"the node of engine-{replica}" for replica in range(replicas) if replica not in known]
    return (
        f"{', '.join(late)}: no copy of {folder} in memory within {timeout_s:g} s (half of engine.update_timeout_s); "
        "the engines there read it themselves"
    )


def _by_url(run: RunDir, done: Sequence[Report], replicas: int, nodes: int) -> dict[str, str]:
    """A replica of several nodes gets one path, which must hold on all of them."""
    found = {}
    for replica in range(replicas):
        paths = [report.path for report in done if replica in report.replicas]
        endpoint = run.engine_endpoint(replica)
        if len(paths) == nodes and len(set(paths)) == 1 and paths[0] is not None and endpoint.exists():
            found[str(json.loads(endpoint.read_text())["url"])] = paths[0]
    return found
