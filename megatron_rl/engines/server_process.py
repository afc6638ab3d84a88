"""One server of many processes: its start, the wait until it answers, its end with all that it has started.

Which server, and with which words, is not decided here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from . import guard

POLL_S = 0.1
TAIL_LINES = 15
ANSWER_TIMEOUT_S = 10.0


class ServerFailed(RuntimeError):
    """The server ended, or did not answer in time; the message holds the end of its output."""


class ServerProcess:
    """A running server, in a session of its own; use as a context manager, which ends all its processes.

    Its output goes to our standard error, line by line. A guard ends it when this process is killed.

    Args:
        name: for messages.
        argv, environ: how it is started.
        grace_s: time that it has to end by itself.
    """

    def __init__(self, name: str, argv: Sequence[str], environ: Mapping[str, str], grace_s: float) -> None:
        self._name, self._grace_s = name, grace_s
        self._shared: set[str] = set()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._guard = subprocess.Popen(
            [sys.executable, "-S", guard.__file__], stdin=subprocess.PIPE, start_new_session=True, text=True
        )
        self._process = subprocess.Popen(
            argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._guard.stdin is not None
        print(self._process.pid, file=self._guard.stdin, flush=True)
        self._reader = threading.Thread(target=self._copy_output, name="output", daemon=True)
        self._reader.start()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def wait_ready(self, url: str, timeout_s: float, stopped: Callable[[], bool], what: str) -> bool:
        """Until `url`/ready answers 200; False when `stopped()` comes first. `what`: the key of the deadline.

        Raises:
            ServerFailed: it ended, or the deadline passed.
        """
        deadline = time.monotonic() + timeout_s
        while not _answers(url):
            if stopped():
                return False
            if self._process.poll() is not None:
                raise self._failure("before it served")
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"{self._name} did not answer {url}/ready within {timeout_s:g} s ({what}); the end of its output:\n"
                    f"{self.tail()}"
                )
            time.sleep(POLL_S)
        self._shared = guard.shared_files(self._process.pid)
        return True

    def wait(self, stopped: Callable[[], bool]) -> None:
        """Until `stopped()`. Raises ServerFailed when it ends by itself."""
        while not stopped():
            if self._process.poll() is not None:
                raise self._failure("while it served")
            time.sleep(POLL_S)

    def end(self) -> None:
        """TERM, and after the grace period KILL, until no process of its session is left."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self._grace_s)
        guard.end_session(self._process.pid)
        guard.remove(self._shared)
        self._process.wait()
        self._reader.join(self._grace_s)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()

    def tail(self) -> str:
        """The last lines of its output, indented."""
        return "\n".join(f"    {line}" for line in self._tail)

    def _failure(self, when: str) -> ServerFailed:
        self._reader.join(1.0)  # what it said last is still being read
        code = self._process.returncode
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return ServerFailed(f"{self._name} {how} {when}; the end of its output:\n{self.tail()}")

    def _copy_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip("\n")
            self._tail.append(text[:300])
            print(text, file=sys.stderr, flush=True)


def call(url: str, body: Mapping[str, Any] | None, api_key: str | None, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
    """POST `body` (GET without one) to a server on this machine; the parsed answer. Raises OSError."""
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout_s) as response:
        text = response.read()
    return json.loads(text) if text else None


def _answers(url: str) -> bool:
    try:
        call(f"{url}/ready", None, None)
    except json.JSONDecodeError:
        return True
    except (OSError, urllib.error.URLError):
        return False
    return True
