"""Control calls to all engine replicas, for the trainer's rank 0. Generation is in `client.py`.

`EngineControl` is plain blocking code. Its calls either succeed everywhere or raise one error that names all replicas
that failed, unless they say that they answer for each replica.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .fanout import FanOut, Interrupted
from .protocol import EngineError, TransportError
from .weight_update import Checksums, WeightUpdate, read_checksums

log = logging.getLogger(__name__)
POLL_S = 0.2
STOP_S = 10.0
"""How long `each` goes on when the run is to end: a replica that is well needs less."""


class EngineControl:
    """Talks to every replica directly (routers do not forward control calls).

    Args:
        urls: base URLs of all replicas.
        timeout_s: deadline of one call to this class, over all replicas and steps.
        patience_s: how long to wait for a replica when a weight update has reached none: they may be restarting.
        api_key: bearer token of the engines, if they want one.
        logs: by URL, where an engine writes its log; messages say so.

    Raises (all methods that do not answer for each replica):
        EngineError: naming every engine that failed, the step, and what it said.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float = 600.0,
        patience_s: float = 0.0,
        api_key: str | None = None,
        logs: Mapping[str, Path] | None = None,
    ) -> None:
        self.urls = list(urls)
        self.calls = FanOut(api_key=api_key, logs=logs)
        self.timeout_s, self.patience_s = timeout_s, patience_s
        self.interrupted: Callable[[], bool] = lambda: False
        """Whether the run is to end; set by whoever learns that. `each` then waits no longer than `STOP_S`."""

    def close(self) -> None:
        """End the connections."""
        self.calls.close()

    # ---------------------------------------------------------------------------------------------------- weights

    def begin_update(
        self, version: int, urls: Sequence[str] | None = None, interrupted: Callable[[], bool] = lambda: False
    ) -> WeightUpdate:
        """An update of all replicas, or of `urls`, to `version`, whose deadline runs from now on."""
        deadline = time.monotonic() + self.timeout_s
        whom = self.urls if urls is None else urls
        return WeightUpdate(self.calls, whom, version, deadline=deadline, interrupted=interrupted)

    def update_from_disk(self, path: str | Path, version: int) -> WeightUpdate:
        """Load the weights at `path` (a Hugging Face directory that the engines can read) as `version`.

        pause(retract) -> flush_cache -> update_weights_from_disk -> checksums equal -> continue -> /model_info says so.
        A replica that fails stays paused, and others go on.

        Raises:
            EngineError: no replica holds the weights.
        """
        update = self.begin_update(version)
        update.pause("retract")
        update.load_from_disk(path, {}, flush=True)
        update.compare()
        update.resume()
        update.disown()
        if not update.left:
            raise nobody_holds(version, update.failed)
        return update

    def wait_for_one(self, give_up: float, interrupted: Callable[[], bool]) -> list[str]:
        """Replicas that answer /ready, waiting for the first one until `give_up` (`time.monotonic`); none = [].

        Raises:
            Interrupted: `interrupted()` came first, though engines that are gone may refuse faster than it is asked.
        """
        log.warning("no engine can be reached; waiting up to %.0f s for one", max(0.0, give_up - time.monotonic()))
        while (left := give_up - time.monotonic()) > 0:
            if ready := list(self.calls.get("/ready", self.urls, left).result(interrupted).answers):
                return ready
            if interrupted():
                raise Interrupted("interrupted: the run is to end")
            time.sleep(POLL_S)
        return []

    def checksums(self) -> dict[str, Checksums]:
        """Per replica and tensor-parallel rank: parameter name -> checksum."""
        bodies = {url: {"action": "checksum"} for url in self.urls}
        answers = self.calls.post("/weights_checker", bodies, self.timeout_s).result().require_all("checksums")
        return {url: read_checksums(url, answer) for url, answer in answers.items()}

    # ------------------------------------------------------------------------------------------------------- state

    def wait_ready(self) -> None:
        """Block until every replica answers /ready."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            left = deadline - time.monotonic()
            replies = self.calls.get("/ready", self.urls, max(left, POLL_S)).result()
            if not replies.failures:
                return
            if left <= 0:
                replies.require_all(f"waiting {self.timeout_s:g} s for engines")
            time.sleep(POLL_S)

    def model_info(self) -> dict[str, Any]:
        """`/model_info` of each replica, by URL."""
        return self.calls.get("/model_info", self.urls, self.timeout_s).result().require_all("model_info")

    def each(
        self, what: str, steps: Mapping[str, Sequence[tuple[str, dict[str, Any]]]], timeout_s: float | None = None
    ) -> dict[str, EngineError | None]:
        """Each replica gets its own (path, body), one after the other; one that fails gets no more of them.

        Args:
            what: in words, for messages.
            steps: by URL.
            timeout_s: another deadline of all steps than usual.

        Returns:
            By URL what went wrong, a TransportError where the replica could not be reached; None = nothing.
        """
        found: dict[str, EngineError | None] = dict.fromkeys(steps)
        deadline, give_up = time.monotonic() + (timeout_s or self.timeout_s), self._soon_after_interruption()
        for number in range(max(map(len, steps.values()), default=0)):
            now = {url: todo[number] for url, todo in steps.items() if len(todo) > number and found[url] is None}
            for path in dict.fromkeys(path for path, _ in now.values()):
                bodies = {url: body for url, (wanted, body) in now.items() if wanted == path}
                left = max(0.0, deadline - time.monotonic())
                replies = self.calls.post(path, bodies, left).result_unless(give_up)
                for url, error in replies.failures.items():
                    kind = TransportError if isinstance(error, TransportError) else EngineError
                    found[url] = kind(f"{what}: step {path.removeprefix('/')} failed: {error}")
        return found

    def _soon_after_interruption(self) -> Callable[[], bool]:
        """Whether `STOP_S` have passed since this function first saw that the run is to end."""
        since: list[float] = []

        def give_up() -> bool:
            if not since and self.interrupted():
                since.append(time.monotonic())
            return bool(since) and time.monotonic() >= since[0] + STOP_S

        return give_up


def nobody_holds(version: int, failed: Mapping[str, EngineError]) -> EngineError:
    """The error of an update that no replica got; a TransportError when one of them could not be reached."""
    unreachable = any(isinstance(error, TransportError) for error in failed.values())
    reasons = "; ".join(str(error) for error in dict.fromkeys(failed.values())) or "there is no engine"
    kind = TransportError if unreachable else EngineError
    return kind(
        f"no engine holds the weights of version {version}: {reasons}; they stay paused until an update succeeds or "
        "they are restarted"
    )
