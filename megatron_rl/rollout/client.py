"""Responses from N replicas, segment by segment: routing, failover, suspension. One request is made by `exchange.py`.

    generate -> gate -> first segments of all samples in one request -> each unfinished sample by itself, one by one
                              |  answer: tokens are appended to the sample, the only place where they are kept
                              |  connection failed, replica out or silent: the same segment again, elsewhere
                              |  HTTP 5xx, or unreadable: elsewhere; the end when another replica does the same
                              |  HTTP 429, 503: again after a pause, elsewhere if another one serves
                              |  suspended: aborted; what the engine has by then is appended, and generate returns

A segment is appended whole and once, or not at all: an answer belongs to one request of one name, and a request that
was given up is never listened to again. Which weights sampled a token is what the engine says of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from .exchange import Exchange
from .flights import Flight, Run, Runs
from .protocol import (
    EngineBusy,
    EngineError,
    Generation,
    GenerationAborted,
    Prompt,
    ProtocolError,
    ReplicaError,
    RequestLost,
    SamplingSettings,
    TransportError,
    require_prompts,
)
from .replicas import Replicas
from .router import Gate
from .sample import Sample, group_of

log = logging.getLogger(__name__)
LOST_PAUSE_S = 0.2
BUSY_PAUSES_S = (0.25, 4.0)
"""The first pause of a request for which there is no room, and the longest one; they double."""


class Engines(Protocol):
    """What the rest of the controller sees of the engines."""

    async def generate(
        self, samples: Sequence[Sample], settings: SamplingSettings | Sequence[SamplingSettings]
    ) -> None:
        """Extend every unfinished sample in place until it is finished, or until its group is suspended.

        One `settings` for all, or one for each sample. When cancelled, the engines are told. Raises EngineError.
        """

    def suspend(self, groups: Collection[str]) -> None:
        """Calls for these groups (`group_name`) return soon; unfinished samples keep what they have."""


@dataclass(frozen=True)
class Limits:
    """How requests are cut and how long is waited.

    segment_tokens: longest part of a response that one request generates. context_length: tokens that a sequence may
    have, prompt included; None = the engine says so. request_timeout_s: from sending a request to its answer; and,
    times of their own, how long requests wait when no replica serves or has room. retries: further attempts after
    failures of replicas ... patience_s: ... and as many more as fit into this time, in which an engine may restart; it
    also is the least wait for a replica to serve.
    """

    segment_tokens: int = 2048
    context_length: int | None = None
    request_timeout_s: float = 600.0
    retries: int = 3
    patience_s: float = 0.0


class EngineClient:
    """Implements `Engines` for the replicas of one run. Use as an async context manager.

    Args:
        exchange: makes the requests.
        replicas: says which serve.
        vocab_size: prompt tokens must be below it.
        concurrency: sequences in flight at once, over all replicas.
        logs: by URL, where an engine writes its log; messages say so.
    """

    def __init__(
        self,
        exchange: Exchange,
        replicas: Replicas,
        *,
        vocab_size: int,
        concurrency: int = 512,
        limits: Limits = Limits(),
        logs: Mapping[str, Path] | None = None,
    ) -> None:
        self._exchange, self.replicas, self._limits = exchange, replicas, limits
        self._vocab_size, self._gate, self._logs = vocab_size, Gate(concurrency), logs or {}
        self._runs = Runs(exchange.abort)
        replicas.on_out = self._runs.drop
        self._background: set[asyncio.Future[None]] = set()
        self.transport_errors = 0

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self._background)

    async def generate(
        self, samples: Sequence[Sample], settings: SamplingSettings | Sequence[SamplingSettings]
    ) -> None:
        """See `Engines`.

        Raises:
            EngineError: an engine refused (its message is carried) or answered wrongly, a deadline passed, no replica
                served, or a prompt cannot be sent (`require_prompts`).
        """
        each = [settings] * len(samples) if isinstance(settings, SamplingSettings) else settings
        jobs = [Job(s, wanted, self._limits) for s, wanted in zip(samples, each, strict=True) if not s.finished]
        require_prompts({id(s.prompt_tokens): s for s in samples}.values(), self._vocab_size)  # a group shares one
        fresh = [job for job in jobs if not job.sample.response_length]
        begun = [[job] for job in jobs if job.sample.response_length]
        parts = [fresh, *begun] if fresh else begun
        with Run({group_of(s.id) for s in samples}, self._runs) as run:
            try:
                await together([self._enter(run, part) for part in parts])
            finally:
                await run.close()

    def suspend(self, groups: Collection[str]) -> None:
        """See `Engines`."""
        self._runs.suspend(groups)

    # ---- one response after its first segment, or the first segments of a group

    async def _enter(self, run: Run, jobs: list[Job]) -> None:
        with self._gate.ticket(len(jobs)) as ticket:
            if not ticket.admitted and not await run.before_suspension(ticket.turn):
                return
            jobs = await self._segment(run, jobs)
            live = len(jobs)
            if not live:
                return
            ticket.keep(live)

            async def alone(job: Job) -> None:
                nonlocal live
                while not run.suspended and await self._segment(run, [job]):
                    pass
                live -= 1
                ticket.keep(live)

            await together([alone(job) for job in jobs])

    async def _segment(self, run: Run, jobs: list[Job]) -> list[Job]:
        """One answered request for all jobs, after as many attempts as it takes; returns those that go on.

        None go on once the run is suspended.
        """
        jobs = [job for job in jobs if not job.complete()]
        while jobs and not run.suspended:
            try:
                answers = await self._attempt(run, jobs)
            except RequestLost as error:
                jobs[0].fail(error)
                await asyncio.sleep(LOST_PAUSE_S)
            except EngineBusy as error:
                self.transport_errors += 1
                await run.pause(jobs[0].pause(error))
            except TransportError as error:
                self.transport_errors += 1
                log.info("%s; what is missing is generated elsewhere or later", error)
                if not run.suspended:
                    jobs[0].fail(error)
            else:
                if answers is None:
                    break
                for job, answer in zip(jobs, answers, strict=True):
                    job.take(answer, run.suspended)
                if not run.suspended and not any(a.tokens.size or a.finish_reason != "abort" for a in answers):
                    await asyncio.sleep(LOST_PAUSE_S)  # aborted unasked: the engine may be in trouble for a while
                return [job for job in jobs if not job.sample.finished]
        return []

    async def _attempt(self, run: Run, jobs: list[Job]) -> list[Generation] | None:
        """One request to a replica that serves; None when the run was suspended before there was one.

        Raises TransportError when the replica or its weights turn out to be bad, ReplicaError when there is no other
        one, or another one failed at the same request in the same way.
        """
        group = group_of(jobs[0].sample.id)
        while True:
            url = self.replicas.router.take(group, len(jobs), jobs[0].busy)
            if url is not None:
                try:
                    return await self._ask(run, url, [job.prompt() for job in jobs])
                except TransportError as error:
                    self.replicas.failed(url, str(error))
                    raise
                except EngineBusy:
                    jobs[0].busy = url
                    raise
                except ReplicaError as error:
                    if len(self.replicas.states) == 1:
                        raise
                    self.replicas.failed(url, str(error), rests=True)
                    jobs[0].require_first(url, error)
                    raise TransportError(str(error)) from error
                finally:
                    self.replicas.router.left(url, len(jobs))
            if not await self._a_replica_serves(run):
                return None

    async def _a_replica_serves(self, run: Run) -> bool:
        """Wait for it; False when the run was suspended first."""
        serves = asyncio.ensure_future(self.replicas.wait_serving())
        longest = max(self._limits.request_timeout_s, self._limits.patience_s)
        try:
            async with asyncio.timeout(longest):
                return await run.before_suspension(serves)
        except TimeoutError:
            reasons = "; ".join(f"{url}: {reason}" for url, reason in self.replicas.states.items())
            logs = ", ".join(map(str, self._logs.values())) or "their logs"
            raise EngineError(
                f"no engine has served for {longest:g} s (rollout.request_timeout_s): {reasons}; look at {logs}"
            ) from None
        finally:
            serves.cancel()

    async def _ask(self, run: Run, url: str, prompts: list[Prompt]) -> list[Generation]:
        published, rids = self.replicas.version, [prompt.rid for prompt in prompts]
        prompts = [prompt._replace(cache_key="" if published is None else str(published)) for prompt in prompts]
        flight = Flight(url, rids)
        run.took_off(flight)
        try:
            async with asyncio.timeout(self._limits.request_timeout_s) as flight.deadline:
                answers = await self._exchange.generate(url, prompts)
        except ProtocolError:  # it has answered, so nothing runs
            raise
        except (TransportError, EngineBusy, ReplicaError, RequestLost):
            self._tell_later(url, rids)  # so that what a broken connection left running takes no room
            raise
        except TimeoutError:
            error = self._gave_up(flight, len(prompts))
            if isinstance(error, TransportError):
                self._tell_later(url, rids)
            else:
                await self._exchange.abort(url, rids)
            raise error from None
        except asyncio.CancelledError:
            await self._exchange.abort(url, rids)
            raise
        finally:
            run.landed(flight)
        self.replicas.heard_of(url)
        _require_published(url, prompts, answers, published)
        return answers

    def _gave_up(self, flight: Flight, sequences: int) -> EngineError:
        """Why the answer is waited for no longer; a TransportError if there may be one elsewhere."""
        where = f"engine {flight.url}: /generate for {group_of(flight.rids[0])}* ({sequences} sequences)"
        if flight.dropped:
            return TransportError(f"{where} was given up: {flight.dropped}")
        kind = TransportError if len(self.replicas.states) > 1 else EngineError  # also one that is out may come back
        return kind(
            f"{where}: no answer within {self._limits.request_timeout_s:g} s (rollout.request_timeout_s); look at "
            f"{self._logs.get(flight.url, 'its log')}, or raise the deadline"
        )

    def _tell_later(self, url: str, rids: Sequence[str]) -> None:
        task = asyncio.ensure_future(self._exchange.abort(url, rids))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class Job:
    """One response that is being generated."""

    def __init__(self, sample: Sample, settings: SamplingSettings, limits: Limits) -> None:
        self.sample, self._settings, self._limits = sample, settings, limits
        self._failures, self._failing_since, self._asked = 0, 0.0, 0
        self._faults: dict[type[ReplicaError], tuple[str, ReplicaError]] = {}
        self._busy_since, self._pause_s = 0.0, 0.0
        self.busy: str | None = None
        """The replica that had no room for it last."""

    def complete(self) -> bool:
        """Finish the sample if it may have no more tokens; whether it is finished."""
        if not self.sample.finished and self._room <= 0:
            self.sample.finish("length")
        return self.sample.finished

    def prompt(self) -> Prompt:
        """The next segment, under a new name: what is there is the prompt, the seed stays the sample's."""
        sample = self.sample
        self._asked = min(self._room, self._limits.segment_tokens)
        tokens = sample.prompt_tokens
        if sample.response_length:
            tokens = np.concatenate([tokens, sample.response_tokens])
        return Prompt(sample.next_request(), tokens, sample.seed, self._asked, self._settings, routed=sample.routed)

    def take(self, answer: Generation, suspended: bool) -> None:
        """Append what the engine generated. Raises GenerationAborted when it keeps aborting without being asked to."""
        aborted = answer.finish_reason == "abort"
        if len(answer.tokens):
            self.sample.append(answer.tokens, answer.log_probs, answer.spans, answer.routes)
            self._failures, self._pause_s, self.busy = 0, 0.0, None
            self._faults.clear()
        elif aborted and not suspended:
            self.fail(GenerationAborted(f"{self.sample.id} was aborted by its engine: {answer.message}"))
        whole_segment = answer.finish_reason == "length" and len(answer.tokens) == self._asked
        if not (aborted or whole_segment):
            self.sample.finish(answer.finish_reason)
        self.complete()

    def fail(self, error: EngineError) -> None:
        """Count an attempt that brought nothing; raises `error` when it was the last one."""
        now = asyncio.get_running_loop().time()
        if not self._failures:
            self._failing_since = now
        self._failures += 1
        if self._failures > self._limits.retries and now - self._failing_since >= self._limits.patience_s:
            raise error

    def require_first(self, url: str, error: ReplicaError) -> None:
        """The replica at `url` failed so; raises when another one has: then it is the request, or the weights."""
        other, earlier = self._faults.setdefault(type(error), (url, error))
        if other != url:
            raise type(error)(f"{error}; at the same request before: {earlier}")

    def pause(self, error: EngineBusy) -> float:
        """Seconds to wait for room; raises `error` when there has been none for too long."""
        now, first, longest = asyncio.get_running_loop().time(), *BUSY_PAUSES_S
        self._busy_since = self._busy_since if self._pause_s else now
        patience_s = max(self._limits.request_timeout_s, self._limits.patience_s)
        if now - self._busy_since >= patience_s:
            raise EngineBusy(f"{error}; no engine had room for {patience_s:g} s (rollout.request_timeout_s)")
        self._pause_s = min(2 * self._pause_s or first, longest)
        return self._pause_s

    @property
    def _room(self) -> int:
        """Tokens that the response may still get."""
        have = self.sample.response_length
        room = self._settings.max_new_tokens - have
        if self._limits.context_length is not None:
            room = min(room, self._limits.context_length - self.sample.prompt_length - have)
        return room


def _require_published(url: str, prompts: list[Prompt], answers: list[Generation], published: int | None) -> None:
    """A replica that answers with older weights than were published before it was asked missed an update."""
    for prompt, answer in zip(prompts, answers, strict=True):
        if published is not None and answer.spans and min(span.version for span in answer.spans) < published:
            raise TransportError(
                f"engine {url}: {prompt.rid} was sampled by weight version {answer.spans[0].version}, but {published} "
                "was published before; did the weight update reach this engine (engine.urls)?"
            )


async def together(tasks: Sequence[Awaitable[None]]) -> None:
    """Wait for all; the first error cancels the others and is raised. Cancelling cancels them all."""
    if len(tasks) == 1:
        await tasks[0]
        return
    running = [asyncio.ensure_future(task) for task in tasks]
    try:
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
