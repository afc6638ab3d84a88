"""One engine as its supervisor sees it: its process, whether it may go on, its end; who decides when is not known here.

An engine that was started again reads in RUN/weights/current.json which version to load and what its checksum must be,
and listens at the same port only when that is right. Until then its clients find the port closed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.tags import all_pids, descendants

from .fellows import Fellows
from .liveness import Silence, listen
from .processes import decode_exit, die_with_parent

log = logging.getLogger(__name__)
KILL_ROUNDS, KILL_PAUSE_S = 200, 0.05


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
        fellows: the other engines, with which the run can go on; None = it needs this one.
    """

    name: str
    argv: Sequence[str]
    endpoint: Path
    limit: RestartLimit
    patience: Patience | None = None
    env: Mapping[str, str] | None = None
    log: Path | None = None
    may_start: Callable[[], bool] = lambda: True
    fellows: Fellows | None = None
    process: subprocess.Popen[bytes] | None = None
    served: bool = False
    _silence: Silence | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _listening: bool = False
    _waits: str = ""

    def start(self) -> None:
        """Start its process, which ends with ours."""
        if self.fellows is not None:
            self.fellows.tell_started()
        self._waits = ""
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
        """True while it runs and answers, or when it has ended, or was ended, and was started again.

        One that failed before it served anything waits for another engine of the run to serve: where none does, the
        reason is most likely the same for all.
        """
        assert self.process is not None
        self.served = self.served or self.endpoint.exists()
        self._listen()
        code = self.process.poll()
        if code is None and self._silence is not None and self._silence.lasts():
            end = self._kill()
        elif code is None:
            return True
        else:
            end = self._waits or decode_exit(code)
        self._over.set()
        if not self.may_start() or self._waits_for_fellows(end):
            return True
        if not self._may_restart(end):
            return False
        self.start()
        return True

    @property
    def replaceable(self) -> bool:
        """Whether the run may go on without it."""
        return self.fellows is not None and self.fellows.may_serve()

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
        left = _kill_tree(self.process.pid)
        if left:
            log.warning("processes %s of %s do not end", left, self.name)
        self.process.wait()
        return words

    def _waits_for_fellows(self, end: str) -> bool:
        if self.fellows is None:
            return False
        self.fellows.tell_failed()
        if self.served or self.fellows.serve() or not self.fellows.may_serve():
            return False
        if not self._waits:
            log.warning("%s %s before it served; it is started again when another engine serves", self.name, end)
        self._waits = end
        return True

    def _may_restart(self, end: str) -> bool:
        what = f"{self.name} {end}"
        if not self.served and (self.fellows is None or not self.fellows.serve()):
            log.error("%s before it served anything; it is not started again", what)
            return False
        if not self.limit.allows():
            log.error(
                "%s; it has been restarted %d times within %.0f s (cluster.max_engine_restarts), that is enough%s",
                what,
                self.limit.count,
                self.limit.window_s,
                "; the run goes on with the others" if self.replaceable else "",
            )
            return False
        log.warning("%s; starting it again", what)
        return True


def _kill_tree(pid: int) -> list[int]:
    """KILL to a child of ours, all that descend from it, and whoever shares a session that one of them began.

    A stopped process ends too. Waits until none is left, ten seconds at most: the memory of a device must be free
    before a successor wants it.

    Returns:
        Who would not go: a process that a driver or a file system holds.
    """
    doomed = {pid, *descendants(pid)}
    sessions = {pid for pid in doomed if _session(pid) == pid}
    for _ in range(KILL_ROUNDS):
        doomed |= {other for other in all_pids() if _session(other) in sessions}  # they may be forking
        left = [one for one in doomed if _session(one) is not None]
        if not left:
            return []
        for one in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        time.sleep(KILL_PAUSE_S)
    return left


def _session(pid: int) -> int | None:
    """None for a process that has ended."""
    try:
        state, _, _, session, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(session)
