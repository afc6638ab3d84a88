"""The trainer's side of the controller: plain blocking calls with deadlines. Nothing is computed from the answers here.

Not thread-safe: one client per thread.
"""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from .endpoint import Endpoint, controller_file, read
from .replicas import UNSEEN
from .wire import Gaps

POLL_S = 0.02
IDLE_S = 10.0
"""A kept connection older than this is opened anew: the server may just be closing it."""


class ControllerError(RuntimeError):
    """The controller failed, refused or does not answer. The message says what was asked and what to do."""


@dataclass(frozen=True)
class StepStatus:
    """How far a step, an update or an evaluation is: waiting, generating, ready, failed or stopped."""

    status: str
    progress: dict[str, int] = field(default_factory=dict)
    message: str = ""
    needs_weights: list[str] = field(default_factory=list)
    """Engines that are up, do not hold the published weights and cannot get them by themselves."""
    engines: dict[str, str] = field(default_factory=dict)
    """By URL, why an engine does not serve; empty for one that does."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of an evaluation that is ready."""


class EngineNews:
    """Which engines went out or came back since the last look, as lines for the user.

    >>> news = EngineNews()
    >>> news.lines({"http://a": "", "http://b": "not looked at yet"})
    []
    >>> news.lines({"http://a": "", "http://b": "connection refused"})
    ['WARNING engine http://b is out (1 of 2 engines serve): connection refused']
    >>> news.lines({"http://a": "", "http://b": "no weights yet"})
    []
    >>> news.lines({"http://a": "", "http://b": ""})
    ['INFO engine http://b serves (2 of 2 engines serve)']
    """

    def __init__(self) -> None:
        self._out: set[str] = set()

    def lines(self, engines: Mapping[str, str]) -> list[str]:
        """`engines`: by URL, why it does not serve; empty for one that does."""
        out = {url: reason for url, reason in engines.items() if reason not in ("", UNSEEN)}
        count = f"({sum(not reason for reason in engines.values())} of {len(engines)} engines serve)"
        gone = [f"WARNING engine {url} is out {count}: {out[url]}" for url in out if url not in self._out]
        back = [f"INFO engine {url} serves {count}" for url in engines if url in self._out and not engines[url]]
        self._out = {*out} | {url for url in self._out if engines.get(url)}
        return gone + back


class ControllerClient:
    """Talks to the controller of `run_dir`.

    Args:
        timeout_s: how long the controller may take to appear (it publishes itself in RUN/endpoints).
        request_timeout_s: how long an answer may make no progress.

    Raises (all methods):
        ControllerError
    """

    def __init__(self, run_dir: str | Path, timeout_s: float = 300.0, request_timeout_s: float = 120.0) -> None:
        self._run_dir = Path(run_dir)
        self._timeout_s, self._request_timeout_s = timeout_s, request_timeout_s
        self._endpoint: Endpoint | None = None
        self._connection: http.client.HTTPConnection | None = None
        self._used_at = 0.0

    # ---- steps

    def set_weights_version(
        self,
        version: int,
        serving: Sequence[str] | None = None,
        checksum: str | None = None,
        *,
        start: bool = True,
        repaired: bool = False,
    ) -> None:
        """Who holds which weights, see `Replicas.publish`; `start`: their step may be sampled now."""
        body = {"version": version, "serving": serving, "checksum": checksum, "start": start, "repaired": repaired}
        self._post("/v1/weights", body)

    def wait_update(self, version: int, timeout_s: float, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Poll until the engines may be updated to weights `version`, or `interrupted()`.

        In synchronous runs that is when nothing is in flight; with one_step_off when the next batch is complete, too.
        Raises ControllerError with the controller's message if sampling has failed.
        """
        self._poll(f"engines free for weights {version}", f"/v1/update/{version}", timeout_s, interrupted)

    def step_status(self, step: int) -> StepStatus:
        """How far step `step` is."""
        return self._status(f"/v1/step/{step}")

    def wait_ready(
        self,
        step: int,
        timeout_s: float,
        interrupted: Callable[[], bool] = lambda: False,
        enough: Callable[[StepStatus], bool] = lambda status: False,
    ) -> StepStatus:
        """Poll until step `step` is ready, or the status is `enough`, or `interrupted()`: then it is what it was.

        Raises ControllerError with the controller's message if the step never will be ready.
        """
        return self._poll(f"the rollouts of step {step}", f"/v1/step/{step}", timeout_s, interrupted, enough)

    def _poll(
        self,
        what: str,
        path: str,
        timeout_s: float,
        interrupted: Callable[[], bool],
        enough: Callable[[StepStatus], bool] = lambda status: False,
    ) -> StepStatus:
        deadline = time.monotonic() + timeout_s
        while (status := self._status(path)).status != "ready":
            if status.status in ("failed", "stopped"):
                raise ControllerError(f"{what}: the controller {status.status}: {status.message or 'no reason given'}")
            if time.monotonic() >= deadline:
                raise ControllerError(
                    f"waited {timeout_s:g} s for {what}; the controller is {status.status}, "
                    f"{status.progress or status.message}; look at {self._log}, or raise rollout.step_timeout_s"
                )
            if interrupted() or enough(status):
                break
            time.sleep(POLL_S)
        return status

    def _status(self, path: str) -> StepStatus:
        return StepStatus(**orjson.loads(self._get(path)))

    def table(self, step: int) -> bytes:
        """A `RolloutTable`, one row per sample of a ready step."""
        return self._get(f"/v1/step/{step}/table")

    def samples(self, step: int, indices: Sequence[int]) -> bytes:
        """A `RolloutShard` of chosen rows of the table, in the order of `indices`."""
        return self._post(f"/v1/step/{step}/samples", {"indices": indices})

    def done(self, step: int, gaps: Gaps | None = None) -> None:
        """Step `step` was trained on; its dump is on disk when this returns. `gaps`: of the table's rows."""
        self._post(f"/v1/step/{step}/done", {"gaps": gaps})

    # ---- evaluation

    def evaluate(
        self,
        *,
        step: int,
        prompts: int,
        samples_per_prompt: int = 1,
        label: str = "eval",
        timeout_s: float = 3600.0,
        interrupted: Callable[[], bool] = lambda: False,
        look: Callable[[Mapping[str, str]], None] = lambda engines: None,
    ) -> dict[str, float] | None:
        """Run a held-out evaluation to its end; metrics named `eval/...`, None when `interrupted()` before it.

        `look` is told again and again why which engines do not serve (`StepStatus.engines`).
        """
        request = {"step": step, "prompts": prompts, "samples_per_prompt": samples_per_prompt, "label": label}
        job = orjson.loads(self._post("/v1/eval", request))["id"]

        def told(status: StepStatus) -> bool:
            look(status.engines)
            return False

        status = self._poll(f"the evaluation at step {step}", f"/v1/eval/{job}", timeout_s, interrupted, told)
        if status.status != "ready":
            return None
        return {f"eval/{name}": value for name, value in status.metrics.items()}

    # ---- checkpoint

    def ledger(self) -> dict[str, int]:
        """What became of every prompt drawn: trained, filtered, waiting, in_flight, finished; and those rejected."""
        return dict(orjson.loads(self._get("/v1/ping"))["ledger"])

    def get_state(self) -> bytes:
        """What a resumed run must give back with `put_state`."""
        return self._get("/v1/state")

    def put_state(self, blob: bytes) -> None:
        """Restore a controller that has just started."""
        self._request("POST", "/v1/state", blob)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> ControllerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- HTTP

    @property
    def _log(self) -> Path:
        return self._run_dir / "logs" / "controller-0.log"

    def _get(self, path: str) -> bytes:
        return self._request("GET", path, None)

    def _post(self, path: str, body: dict[str, Any]) -> bytes:
        return self._request("POST", path, orjson.dumps(body))

    def _request(self, method: str, path: str, body: bytes | None) -> bytes:
        if self._endpoint is None:
            self._endpoint = self._find()
        try:
            status, answer = self._exchange(self._endpoint, method, path, body)
        except (OSError, http.client.HTTPException) as error:
            raise ControllerError(
                f"{method} {path}: the controller at {self._endpoint.url} does not answer "
                f"({type(error).__name__}: {error}); look at {self._log}"
            ) from error
        if status != 200:
            raise ControllerError(f"controller: {_message(answer)} (HTTP {status})")
        return answer

    def _exchange(self, endpoint: Endpoint, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        if time.monotonic() - self._used_at > IDLE_S:
            self.close()
        try:
            if self._connection is None:
                self._connection = self._connect(endpoint.url)
            headers = {"Authorization": f"Bearer {endpoint.token}", "Content-Type": "application/octet-stream"}
            self._connection.request(method, path, body, headers)
            response = self._connection.getresponse()
            answer = response.read()
        except BaseException:
            self.close()
            raise
        self._used_at = time.monotonic()
        return response.status, answer

    def _connect(self, url: str) -> http.client.HTTPConnection:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=self._request_timeout_s)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _find(self) -> Endpoint:
        """Wait until the endpoint is published and answers (a file left by an earlier run does not)."""
        deadline = time.monotonic() + self._timeout_s
        problem = "it does not exist"
        while True:
            endpoint = read(self._run_dir)
            if endpoint is not None:
                try:
                    status, answer = self._exchange(endpoint, "GET", "/v1/ping", None)
                    if status == 200:
                        return endpoint
                    problem = _message(answer)
                    self.close()
                except (OSError, http.client.HTTPException) as error:
                    problem = f"{endpoint.url} does not answer: {error}"
            if time.monotonic() >= deadline:
                raise ControllerError(
                    f"waited {self._timeout_s:g} s for the controller to publish {controller_file(self._run_dir)}: "
                    f"{problem}; look at {self._log}"
                )
            time.sleep(5 * POLL_S)


def _message(answer: bytes) -> str:
    try:
        return str(orjson.loads(answer)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return answer.decode(errors="replace")[:500]
