"""Keeps one engine of a run alive: starts it, starts it again when it dies, gives up when it dies too often.

Waits for: the engine's end, without a deadline, since it serves as long as the run lasts; TERM ends both.

Nobody need be told of a restart. The port stays the same, since it is reserved here; the engine reads in
RUN/weights/current.json which version to load and what its checksum must be, and listens only when that is right. Until
then its clients find the port closed, and try again for a while.
"""

from __future__ import annotations

import functools
import logging
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_rl.config import Config

from .processes import decode_exit, die_with_parent
from .run_dir import RunDir

log = logging.getLogger(__name__)


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


def supervise_engine(cfg: Config, config: Path, replica: int) -> int:
    """Run replica number `replica` of the run that `config` describes, until TERM. Returns the exit code."""
    cluster = cfg.cluster
    with reserved_port("127.0.0.1") as reservation:
        port = reservation.getsockname()[1]
        argv = [sys.executable, "-m", "megatron_rl.cli", "serve", "--config", str(config), "--replica", str(replica)]
        return supervise(
            [*argv, "--unsupervised", "--port", str(port)],
            RunDir(cfg.run_dir).engine_endpoint(replica),
            RestartLimit(cluster.max_engine_restarts, cluster.engine_restart_window_s),
        )


def reserved_port(host: str) -> socket.socket:
    """A socket bound to a free port that never listens: others cannot get the port, the engine can bind beside it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reservation = socket.socket(family, socket.SOCK_STREAM)
    # Only processes of this user that set it too may bind; with SO_REUSEADDR instead, the system would give the port to
    # whoever asks for any free one.
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reservation.bind((host, 0))
    return reservation


def supervise(argv: Sequence[str], endpoint: Path, limit: RestartLimit) -> int:
    """Start `argv` again and again until TERM (0), a failure before its first `endpoint`, or past the limit (1)."""
    stopping: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def end(number: int, _: object) -> None:
        stopping.append(number)
        if child is not None and child.poll() is None:
            child.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    served = False
    while not stopping:
        child = subprocess.Popen(argv, preexec_fn=functools.partial(die_with_parent, signal.SIGTERM))
        if stopping:  # the signal came before there was a child to pass it on to
            child.terminate()
        code = child.wait()
        served = served or endpoint.exists()
        if not stopping and not _may_restart(code, served, limit):
            return 1
    return 0


def _may_restart(code: int, served: bool, limit: RestartLimit) -> bool:
    what = decode_exit(code)
    if not served:
        log.error("the engine %s before it served anything; it is not started again", what)
        return False
    if not limit.allows():
        log.error(
            "the engine %s; it has been restarted %d times within %.0f s (cluster.max_engine_restarts), that is enough",
            what,
            limit.count,
            limit.window_s,
        )
        return False
    log.warning("the engine %s; starting it again", what)
    return True
