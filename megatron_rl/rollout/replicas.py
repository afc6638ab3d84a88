"""Which replicas serve, and why the others do not: watched, taken out, verified, put back. Requests are in `client.py`.

    out (reason) --/ready, right model, published version, its checksum--> serving
       ^___ connection failed | silent | wrong version | not updated ________|
       ^___ failed at a request, or its answer cannot be read: for a while __|

A replica that is up but was not given the published weights is named in `needs_weights`, since nothing that is done
here helps it. Its label and checksum alone do not bring it back, as it may be paused in an update that failed: the
trainer must say that it holds them, or it must have been restarted. What was found out about a replica counts only if
nothing was published meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from .fitness import ExpectedModel, Misfit, Unfit, require_model, require_routed_experts
from .protocol import EngineError, version_of
from .router import Router
from .session import error_text

log = logging.getLogger(__name__)
POLL_S = 1.0
PROBE_TIMEOUT_S = 5.0
SILENT_S = 30.0
"""A replica that answers nothing for so long, not even /ready, is out. A busy one may take seconds."""
REST_S = 30.0
"""A replica that can be reached, but failed at a request, is out for so long, or until another process is in its place:
what is looked at here would bring it back at once."""
LATE_S = 0.5
"""A timeout that comes so much later says nothing about the replica."""
CHECKSUM_TIMEOUT_S = 120.0
UNSEEN = "not looked at yet"


@dataclass
class Replica:
    """What is known of one replica. `reason` is empty while it serves."""

    url: str
    reason: str = UNSEEN
    lacks_weights: str = ""
    """Why it must not be believed to hold the published weights, until the trainer says so or it was restarted."""
    needs_weights: bool = False
    """It lacks them and is up."""
    unfit: bool = False
    """It said itself why it must not serve; new weights do not change that."""
    misfit: bool = False
    """It is unfit as it was started, and stays so until it is started otherwise."""
    verified: bool = False
    """Since it was last out."""
    rests_until: float = 0.0
    """It does not come back earlier."""
    heard_at: float = 0.0
    told: int = 0
    """How often something was said of it. What had been asked before does not count any more."""
    look: asyncio.Event = field(default_factory=asyncio.Event)
    """It is to be looked at soon."""

    @property
    def serving(self) -> bool:
        """Whether it may get requests."""
        return not self.reason


class _NeedsWeights(Exception):
    """It would serve with the published weights."""


class _TooEarly(Exception):
    """It is ahead of what was published: its weights are being updated, and whoever does that will say so."""


class Replicas:
    """The monitor. `run` is its loop; without it nothing comes back.

    Args:
        urls: base URLs of all replicas.
        session: with the engines' key.
        expected: what they must serve; None = not checked.
        weights_dir: where the run says what it has published, RUN/weights.
        restarted: someone starts them again, so that even a `Misfit` may be another engine soon.
        clock: seconds, of any beginning.
    """

    def __init__(
        self,
        urls: Sequence[str],
        session: aiohttp.ClientSession,
        expected: ExpectedModel | None = None,
        weights_dir: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        restarted: bool = False,
    ) -> None:
        self.router = Router(urls)
        self.router.serve([])
        self.version: int | None = None
        """What the engines were last said to hold; None before the first time."""
        self.on_out: Callable[[str, str], None] = lambda url, reason: None
        """Called with URL and reason when one is taken out: its requests must go elsewhere."""
        self._checksum: str | None = None
        self._replicas = {url: Replica(url, heard_at=clock()) for url in urls}
        self._session, self._expected, self._weights_dir, self._clock = session, expected, weights_dir, clock
        self._changed, self._restarted = asyncio.Event(), restarted
        self._fewest, self._outages = len(urls), 0

    # ---- what is told to it

    def publish(
        self, version: int, serving: Collection[str] | None, checksum: str | None = None, repaired: bool = False
    ) -> None:
        """These replicas hold weights `version`, others are out until they are given them.

        Args:
            version: what is published from now on.
            serving: base URLs; None: all that serve.
            checksum: what an engine says of these weights; None: RUN/weights/current.json is asked.
            repaired: `serving` were given the weights once more; of the others nothing is said.
        """
        if checksum is not None or version != self.version or not (repaired or serving is None):
            self._checksum = checksum
        self.version = version
        for replica in self._replicas.values():
            replica.told += 1
            replica.look.set()
            if serving is None:
                continue
            if replica.url in serving:
                self._given_weights(replica, repaired)
            elif not repaired:
                replica.lacks_weights = f"was not updated to weight version {version}"
                if not replica.unfit:
                    self._take_out(replica, replica.lacks_weights)

    def _given_weights(self, replica: Replica, repaired: bool) -> None:
        """One that was repaired may be out for its connection by now; what is unfit must first be seen to be fit."""
        put_back = not replica.unfit and not self._rests(replica) and (replica.needs_weights or not repaired)
        replica.lacks_weights, replica.needs_weights = "", False
        if put_back:
            self._put_back(replica)

    def failed(self, url: str, reason: str, rests: bool = False) -> None:
        """A request met this; the replica is out until it is verified, and for `REST_S` if it `rests`."""
        replica = self._replicas[url]
        if replica.serving:  # else the reason is known: later failures follow from it
            replica.told += 1
            replica.rests_until = self._clock() + REST_S if rests else 0.0
            self._take_out(replica, reason)
            replica.look.set()

    def heard_of(self, url: str) -> None:
        """It has answered something."""
        self._replicas[url].heard_at = self._clock()

    # ---- what it tells

    @property
    def needs_weights(self) -> list[str]:
        """Replicas that are up but were not given the published weights."""
        return [r.url for r in self._replicas.values() if r.needs_weights]

    @property
    def serving(self) -> list[str]:
        """Replicas that may get requests."""
        return [r.url for r in self._replicas.values() if r.serving]

    @property
    def states(self) -> Mapping[str, str]:
        """By URL, why a replica is out; empty for one that serves."""
        return {r.url: r.reason for r in self._replicas.values()}

    def tally(self) -> tuple[int, int]:
        """The fewest that served at once, and how often one went out, since this was last asked."""
        serving = len(self.serving)
        told = min(self._fewest, serving), self._outages
        self._fewest, self._outages = serving, 0
        return told

    async def wait_serving(self) -> None:
        """Until one serves; the caller sets the deadline.

        Raises EngineError at once when every one must be started otherwise, and nobody here starts it.
        """
        while not self.serving:
            if not self._restarted and all(replica.misfit for replica in self._replicas.values()):
                reasons = "; ".join(f"{url}: {reason}" for url, reason in self.states.items())
                raise EngineError(f"none of the engines of engine.urls can serve this run: {reasons}")
            self._changed.clear()
            await self._changed.wait()

    # ---- the loop

    async def run(self) -> None:
        """Look at all replicas, over and over; at each by itself, since one that hangs must not hide the others."""
        await asyncio.gather(*(self._watch(replica) for replica in self._replicas.values()))

    async def _watch(self, replica: Replica) -> None:
        while True:
            replica.look.clear()
            await self._check(replica)
            try:
                async with asyncio.timeout(POLL_S):
                    await replica.look.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(POLL_S / 10)  # a burst of failures is looked at once

    async def _check(self, replica: Replica) -> None:
        told, began = replica.told, self._clock()
        problem: Exception | None = None
        try:
            await self._examine(replica)
        except Exception as error:
            problem = error
        if told == replica.told:  # else it may speak of other weights, and is looked at again soon
            self._conclude(replica, problem, began)

    async def _examine(self, replica: Replica) -> None:
        await self._probe(replica.url)
        self.heard_of(replica.url)
        if not replica.verified:
            await self._verify(replica)
        self.router.report(replica.url, await self._load(replica.url))

    def _conclude(self, replica: Replica, problem: Exception | None, began: float) -> None:
        match problem:
            case None:
                replica.verified = True
                if not (replica.serving or self._rests(replica)):
                    self._put_back(replica)
            case TimeoutError():
                if self._clock() - began > PROBE_TIMEOUT_S + LATE_S and replica.serving:
                    self.heard_of(replica.url)  # it is this process that is late: the answer may have been there
                silent = self._clock() - replica.heard_at
                if silent >= SILENT_S or not replica.serving:
                    self._take_out(replica, f"silent for {silent:.0f} s, /ready does not answer")
            case aiohttp.ClientError():
                self._take_out(replica, f"{type(problem).__name__}: {problem}")
                if isinstance(problem, aiohttp.ClientConnectorError) and isinstance(
                    problem.os_error, ConnectionRefusedError
                ):
                    replica.lacks_weights, replica.rests_until = "", 0.0  # what comes back is another process
            case _NeedsWeights():
                self._take_out(replica, str(problem))
                replica.lacks_weights, replica.needs_weights = str(problem), True
            case _TooEarly():
                if not replica.serving:
                    self._take_out(replica, str(problem))
            case Unfit():
                self._take_out(replica, str(problem))
                replica.unfit, replica.misfit = True, isinstance(problem, Misfit)
                self._changed.set()
            case _:
                if replica.serving or not replica.unfit:
                    log.error("engine %s cannot be judged", replica.url, exc_info=problem)
                self._take_out(replica, f"cannot be judged: {problem!r}")
                replica.unfit = True

    async def _probe(self, url: str) -> None:
        async with asyncio.timeout(PROBE_TIMEOUT_S), self._session.get(f"{url}/ready") as response:
            body = await response.read()
        if response.status != 200:
            raise Unfit(f"/ready says HTTP {response.status} {error_text(body)}".strip())

    async def _load(self, url: str) -> int:
        """Sequences that it has; 0 where it does not say."""
        try:
            ranks = (await self._get(url, "/v1/loads?include=core"))["loads"]
            return sum(int(rank["num_running_reqs"]) + int(rank["num_waiting_reqs"]) for rank in ranks)
        except (Unfit, KeyError, TypeError, ValueError):
            return 0

    async def _verify(self, replica: Replica) -> None:
        """Model, version, checksum. Raises Unfit, _NeedsWeights, _TooEarly."""
        info = await self._get(replica.url, "/model_info")
        if self._expected is not None:
            require_model(info, self._expected)
            if self._expected.routed_experts:
                require_routed_experts(await self._get(replica.url, "/server_info"))
        if replica.lacks_weights:
            raise _NeedsWeights(replica.lacks_weights)
        published, label = self.version, info.get("weight_version")
        if published is None:
            return
        held = version_of(label)
        if held is not None and held > published:
            raise _TooEarly(f"holds weight version {label!r}, and {published} is published; it is being updated")
        if held != published:
            raise _NeedsWeights(f"holds weight version {label!r}, but {published} is published")
        expected = self._published_checksum()
        if expected is None:
            return
        answer = await self._get(replica.url, "/weights_checker", {"action": "checksum"}, CHECKSUM_TIMEOUT_S)
        if answer.get("per_engine_checksum") != expected:
            if (await self._get(replica.url, "/model_info")).get("weight_version") != label:
                raise _TooEarly(f"held weight version {label!r}; it is being updated")
            raise _NeedsWeights(f"holds other weights than the published version {published}: wrong checksum")

    def _published_checksum(self) -> str | None:
        """As the trainer told, else that of RUN/weights/current.json, if it speaks of the published version."""
        if self._checksum is not None:
            return self._checksum
        try:
            current = json.loads((self._weights_dir / "current.json").read_text()) if self._weights_dir else {}
        except (FileNotFoundError, ValueError):
            return None
        return current.get("checksum") if current.get("version") == self.version else None

    async def _get(
        self, url: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = PROBE_TIMEOUT_S
    ) -> dict[str, Any]:
        method = "GET" if body is None else "POST"
        async with asyncio.timeout(timeout_s), self._session.request(method, url + path, json=body) as response:
            answer = await response.read()
        if response.status in (401, 403):
            raise Misfit(
                f"{path} says HTTP {response.status}: {error_text(answer)}; start it and the run with one "
                "engine.api_key_file"
            )
        if response.status != 200:
            raise Unfit(f"{path} says HTTP {response.status}: {error_text(answer)}")
        try:
            value = orjson.loads(answer)
        except orjson.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            raise Unfit(f"{path} is not answered with a JSON object; is this an engine?")
        return value

    # ---- states

    def _take_out(self, replica: Replica, reason: str) -> None:
        was_serving, known = replica.serving, replica.reason == reason
        replica.reason, replica.needs_weights = reason or "failed", False
        replica.unfit = replica.misfit = replica.verified = False
        if not known:
            log.warning("engine %s is out: %s", replica.url, reason)
        if was_serving:
            self._outages, self._fewest = self._outages + 1, min(self._fewest, len(self.serving))
            self._serve()
            self.on_out(replica.url, reason)

    def _rests(self, replica: Replica) -> bool:
        return self._clock() < replica.rests_until

    def _put_back(self, replica: Replica) -> None:
        if not replica.serving:
            log.info("engine %s serves (it was out: %s)", replica.url, replica.reason)
        replica.reason, replica.needs_weights, replica.unfit, replica.misfit = "", False, False, False
        self._serve()

    def _serve(self) -> None:
        self.router.serve(self.serving)
        self._changed.set()
