"""Keeps the engines of one machine alive: starts one again that died or hangs, gives up when that comes too often.

Waits for: an engine's end, without a deadline, since it serves as long as the run lasts, unless it falls silent (see
`liveness.py`), which ends it; TERM or INT ends all.

Nobody need be told of a restart. The port stays the same, since it is reserved here; the engine reads in
RUN/weights/current.json which version to load and what its checksum must be, and listens only when that is right. Until
then its clients find the port closed, and try again for a while.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.config import Config

from .bootstrap import child_environment, task_of_step
from .liveness import Silence, listen
from .ports import free_port
from .processes import decode_exit, die_with_parent
from .run_dir import RunDir
from .staged import Report
from .staging import Stage, carry_out_requests
from .tree import kill_tree
from .turn import engines_may_start

log = logging.getLogger(__name__)
POLL_S = 0.1


class RestartLimit:
    """At most `count` restarts within any `window_s` seconds.

    >>> limit = RestartLimit(1, 60.0, clock=iter([0.0, 10.0, 61.0]).__next__)
    >>> limit.allows(), limit.allows(), limit.allows()
    (True, False, True)
    """

    def __init__(self, count: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.count, self.window_s, self._clock = count, window_s, clock
        self._times: deque[float] = deque()

    def allows(self) -> bool:
        """Whether one more is within the bound; if so, it counts."""
        now = self._clock()
        while self._times and now - self._times[0] > self.window_s:
            self._times.popleft()
        if len(self._times) >= self.count:
            return False
        self._times.append(now)
        return True


@dataclass(frozen=True)
class Patience:
    """How long an engine may be silent.

    Attributes:
        url: where it will serve.
        api_key: its bearer token.
        start_s: until it serves.
        silent_s: from then on.
    """

    url: str
    api_key: str | None
    start_s: float
    silent_s: float


@dataclass
class Engine:
    """One replica as its supervisor sees it.

    Attributes:
        name: for messages.
        argv: what starts it.
        endpoint: the file that it writes once it serves.
        limit: how often it may be started again.
        patience: with its silence; None = it is not asked (a part of a replica that publishes no address).
        env: its environment; None = ours.
        log: where its output is appended; None = where ours goes.
        may_start: whether it may be started again now, or has to wait.
    """

    name: str
    argv: Sequence[str]
    endpoint: Path
    limit: RestartLimit
    patience: Patience | None = None
    env: Mapping[str, str] | None = None
    log: Path | None = None
    may_start: Callable[[], bool] = lambda: True
    process: subprocess.Popen[bytes] | None = None
    served: bool = False
    _silence: Silence | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _listening: bool = False

    def start(self) -> None:
        """Start its process, which ends with ours."""
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(open(self.log, "ab")) if self.log else None
            self.process = subprocess.Popen(
                self.argv,
                env=self.env,
                stdout=output,
                stderr=output,
                preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),
            )
        if self.patience is not None:
            self._silence, self._listening = Silence(self.patience.start_s), False

    def may_go_on(self) -> bool:
        """True while it runs and answers, or when it has ended, or was ended, and was started again."""
        assert self.process is not None
        self.served = self.served or self.endpoint.exists()
        self._listen()
        code = self.process.poll()
        if code is None and self._silence is not None and self._silence.lasts():
            end = self._kill()
        elif code is None:
            return True
        else:
            end = decode_exit(code)
        self._over.set()
        if not self.may_start():
            return True
        if not self._may_restart(end):
            return False
        self.start()
        return True

    def stop(self) -> None:
        """Ask it to end."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def end(self, deadline: float) -> None:
        """Wait for its end; KILL when it has not come by `deadline`, a monotonic time."""
        assert self.process is not None
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("%s does not end; killing it", self.name)
            self.process.kill()
            self.process.wait()

    def _listen(self) -> None:
        """From the moment at which this very process has published its address, ask it there."""
        if self.patience is None or self._listening or not self._has_published():
            return
        self._silence, self._over, self._listening = Silence(self.patience.silent_s), threading.Event(), True
        listen(self._silence, self.patience.url, self.patience.api_key, self._over)

    def _has_published(self) -> bool:
        assert self.process is not None
        try:
            return bool(json.loads(self.endpoint.read_text())["pid"] == self.process.pid)
        except FileNotFoundError:
            return False

    def _kill(self) -> str:
        """End it with all its processes. Returns what happened, for people."""
        assert self.process is not None
        assert self.patience is not None
        words = f"did not serve within {self.patience.start_s:g} s (engine.ready_timeout_s and silent_timeout_s)"
        if self._listening:
            words = f"was silent for {self.patience.silent_s:g} s (engine.silent_timeout_s)"
        log.warning("%s %s; killing it", self.name, words)
        left = kill_tree(self.process.pid)
        if left:
            log.warning("processes %s of %s do not end", left, self.name)
        self.process.wait()
        return words

    def _may_restart(self, end: str) -> bool:
        what = f"{self.name} {end}"
        if not self.served:
            log.error("%s before it served anything; it is not started again", what)
            return False
        if not self.limit.allows():
            log.error(
                "%s; it has been restarted %d times within %.0f s (cluster.max_engine_restarts), that is enough",
                what,
                self.limit.count,
                self.limit.window_s,
            )
            return False
        log.warning("%s; starting it again", what)
        return True


def supervise_engine(cfg: Config, config: Path, replica: int) -> int:
    """Run replica number `replica` of the run that `config` describes, until TERM. Returns the exit code."""
    return _supervise_replicas(cfg, config, [replica], "127.0.0.1")


def supervise_node(cfg: Config, config: Path, per_node: int, host: str, logs: Path) -> int:
    """Run this node's replicas, as one task of a Slurm step: `per_node` of them, by the task's number, until TERM.

    Each logs to LOGS/engine-NODE-REPLICA.log and listens on `host`. What Slurm and MPI say about the step stays hidden
    from them: a server that starts ranks of its own would take itself for a rank of ours. Returns the exit code.
    """
    task, span = task_of_step(os.environ)[1], cfg.engine.nodes_per_replica
    first = task * per_node // span
    replicas = range(first, min(first + per_node, cfg.engine.replicas))
    return _supervise_replicas(cfg, config, replicas, host, child_environment(os.environ), logs, task % span)


def _supervise_replicas(
    cfg: Config,
    config: Path,
    replicas: Sequence[int],
    host: str,
    env: Mapping[str, str] | None = None,
    logs: Path | None = None,
    node_rank: int = 0,
) -> int:
    """`node_rank`: which of its nodes this is, for a replica that spans several; its parts only restart together."""
    cluster, run = cfg.cluster, RunDir(cfg.run_dir)
    restarts = cluster.max_engine_restarts if cfg.engine.nodes_per_replica == 1 else 0
    node = socket.gethostname().split(".")[0]
    with contextlib.ExitStack() as stack:
        staged: list[str] = []
        copies = stack.enter_context(contextlib.ExitStack())
        if cfg.engine.stage_in_memory:
            stage, name = copies.enter_context(Stage(run)), node if logs else f"{node}-{replicas[0]}"
            copies.enter_context(carry_out_requests(stage, run, Report(node, [*replicas]), name))
            staged = ["--staged", str(stage.folder)]
        engines = []
        for place, replica in enumerate(replicas):
            port = stack.enter_context(reserved_port(host, cfg.engine.kind == "sglang")).getsockname()[1]
            argv = [sys.executable, "-m", "megatron_rl.cli", "serve", "--config", str(config), "--unsupervised"]
            argv += ["--replica", str(replica), "--place", str(place), "--node-rank", str(node_rank), *staged]
            engine = Engine(
                "the engine" if logs is None else f"engine-{replica}",
                [*argv, "--host", host, "--port", str(port)],
                run.engine_endpoint(replica),
                RestartLimit(restarts, cluster.engine_restart_window_s),
                _patience(cfg, host, port) if node_rank == 0 else None,
                env,
                None if logs is None else logs / f"engine-{node}-{replica}.log",
                functools.partial(engines_may_start, run.endpoints),
            )
            engines.append(engine)
        return supervise(engines, cluster.stop_timeout_s, copies.close)


def _patience(cfg: Config, host: str, port: int) -> Patience:
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{local}]:{port}" if ":" in local else f"http://{local}:{port}"
    engine = cfg.engine
    start_s = engine.ready_timeout_s + engine.silent_timeout_s
    return Patience(url, engine.read_api_key(cfg.run_dir), start_s, engine.silent_timeout_s)


def reserved_port(host: str, for_sglang: bool = False) -> socket.socket:
    """A socket bound to a free port that never listens: others cannot get the port, the engine can bind beside it."""
    if for_sglang:  # which sets SO_REUSEADDR alone; the port is one that the system gives to nobody
        reservation = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind((host, free_port(host)))
        return reservation
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reservation = socket.socket(family, socket.SOCK_STREAM)
    # Only processes of this user that set it too may bind; with SO_REUSEADDR instead, the system would give the port to
    # whoever asks for any free one.
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reservation.bind((host, 0))
    return reservation


def supervise(engines: Sequence[Engine], patience_s: float, tidy: Callable[[], None] = lambda: None) -> int:
    """Start all again and again until TERM or INT (0), or until one may not be started again (1), which ends all.

    Args:
        patience_s: from TERM to KILL, for an engine that hangs.
        tidy: called when engines were told to end, before they are waited for: we may be killed meanwhile.
    """
    stopping: list[int] = []

    def end(number: int, _: object) -> None:
        stopping.append(number)
        for engine in engines:
            engine.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    for engine in engines:
        engine.start()
    while not stopping and all(engine.may_go_on() for engine in engines):
        time.sleep(POLL_S)
    for engine in engines:  # also one that was being started when the signal came
        engine.stop()
    deadline = time.monotonic() + patience_s
    tidy()
    for engine in engines:
        engine.end(deadline)
    return 0 if stopping else 1
