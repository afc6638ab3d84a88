"""Scoring many responses: here, or in worker processes with a deadline per item; what a verifier computes is elsewhere.

    score(items) -> queue -> one task per worker: send a few jobs -> one answer after the other -> results, in order
                                       |  late: kill the worker, this item is NaN, the jobs behind it go to a new one
                                       |  dead: a new worker tries the item once more; NaN if that dies as well

A task waits for: a job in the queue (no deadline: nothing to do), a worker to start (START_TIMEOUT_S), an answer
(`reward.timeout_s` each). A failed item is data, not an exception, unless `reward.on_error: fail`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.data.records import PromptRecord

from . import frames
from .compose import RewardResult, combine
from .evaluate import Evaluator, Outcome
from .pool_worker import PoolWorker, WorkerDied
from .registry import RewardError, check_name, is_inline_safe

if TYPE_CHECKING:
    from megatron_rl.config.reward import RewardConfig

Item = tuple[PromptRecord, str]
"""A record and the text of a response."""

_CHUNK = 16
"""Jobs sent to a worker at once, so that it never waits for the event loop between two of them."""
_LOGGED_ERRORS = 5
"""Failures logged in full; later ones are only counted."""
_INLINE_SLICE = 64
"""Items scored in the controller before other tasks of its event loop get a turn."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Job:
    item: Item
    done: asyncio.Future[Outcome]
    has_ended_a_worker: bool = False


class RewardPool:
    """Scores responses with the verifiers of `reward_cfg`; use `async with`, or `start()` and `close()`.

    Raises `RewardError` at once for an unknown component, and when workers=0 with a verifier that needs a process.
    """

    def __init__(self, reward_cfg: RewardConfig) -> None:
        self._cfg = reward_cfg
        self._inline = _make_inline(reward_cfg)
        self._queue: asyncio.Queue[_Job] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._workers: set[PoolWorker] = set()
        self._broken: RewardError | None = None
        self._failures = 0

    async def __aenter__(self) -> RewardPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the workers, if any, and load the verifiers. Raises `RewardError`."""
        started = await asyncio.gather(
            *(self._start_worker() for _ in range(self._cfg.workers)), return_exceptions=True
        )
        for outcome in started:
            if isinstance(outcome, BaseException):
                await self.close()
                raise outcome
        self._tasks = [asyncio.create_task(self._serve(worker)) for worker in tuple(self._workers)]

    async def _start_worker(self) -> PoolWorker:
        components = [(component.name, component.args) for component in self._cfg.components]
        what = f"a reward worker did not load {', '.join(name for name, _ in components)}"
        worker, _ = await PoolWorker.start(f"{__package__}.worker", {"components": components}, RewardError, what)
        self._workers.add(worker)
        return worker

    async def score(self, items: Sequence[Item]) -> list[RewardResult]:
        """One result per item, in order. Several calls may run at once.

        Raises `RewardError` when a lost worker cannot be replaced, when the pool is or gets closed, and with
        `on_error: fail` for the first item without a result.
        """
        if self._broken is not None:
            raise self._broken
        if self._inline is not None:
            outcomes = await self._score_here(items, self._inline)
        else:
            loop = asyncio.get_running_loop()
            jobs = [_Job(item, loop.create_future()) for item in items]
            for job in jobs:
                self._queue.put_nowait(job)
            outcomes = await asyncio.gather(*(job.done for job in jobs))
        return [self._result(item, outcome) for item, outcome in zip(items, outcomes, strict=True)]

    async def close(self) -> None:
        """End all workers; calls of `score` that still wait raise `RewardError`."""
        self._broken = self._broken or RewardError("the reward pool is closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._fail_waiting(self._broken)
        await asyncio.gather(*(worker.close() for worker in self._workers))
        self._workers.clear()

    async def _score_here(self, items: Sequence[Item], evaluate: Evaluator) -> list[Outcome]:
        outcomes = []
        for number, (record, response) in enumerate(items, start=1):
            outcomes.append(evaluate(response, record))
            if number % _INLINE_SLICE == 0:
                await asyncio.sleep(0)
        return outcomes

    async def _serve(self, worker: PoolWorker | None) -> None:
        """One worker's life: jobs from the queue, a new process after one that was lost."""
        jobs: list[_Job] = []
        try:
            while True:
                jobs = await self._take()
                while jobs:
                    if worker is None:
                        worker = await self._start_worker()
                    jobs = await self._run(worker, jobs)
                    if worker not in self._workers:
                        worker = None
        except BaseException as error:
            self._give_up(error, jobs)
            raise

    async def _take(self) -> list[_Job]:
        """Some jobs; not so many that other workers would stand idle. Waits until there is one."""
        jobs = [await self._queue.get()]
        share = math.ceil((self._queue.qsize() + 1) / self._cfg.workers)
        while len(jobs) < min(share, _CHUNK) and not self._queue.empty():
            jobs.append(self._queue.get_nowait())
        return [job for job in jobs if not job.done.done()]  # without those whose caller was cancelled

    async def _run(self, worker: PoolWorker, jobs: list[_Job]) -> list[_Job]:
        """Have the jobs done; returns those that were not begun because the worker was lost on the way."""
        for job in jobs:
            record, response = job.item
            worker.send({"record": record, "response": response})
        for index, job in enumerate(jobs):
            try:
                outcome = frames.from_reply(await worker.receive(self._cfg.timeout_s))
            except TimeoutError:
                reason = f"timeout: no answer after reward.timeout_s={self._cfg.timeout_s:g} s"
            except WorkerDied as error:
                reason = f"the worker process died ({error})"
                if not job.has_ended_a_worker:
                    # Whoever killed it, an operator or the system for want of memory, need not have meant this item.
                    job.has_ended_a_worker = True
                    await self._lose(worker)
                    return jobs[index:]
            else:
                _resolve(job, outcome)
                continue
            _resolve(job, self._nothing(reason))
            await self._lose(worker)
            return jobs[index + 1 :]
        return []

    async def _lose(self, worker: PoolWorker) -> None:
        self._workers.discard(worker)
        await worker.kill()

    def _nothing(self, reason: str) -> Outcome:
        count = len(self._cfg.components)
        return Outcome((math.nan,) * count, dict.fromkeys(range(count), reason))

    def _give_up(self, error: BaseException, jobs: list[_Job]) -> None:
        """A task ends: nobody may wait for it for ever."""
        if self._broken is None and not isinstance(error, asyncio.CancelledError):
            self._broken = (
                error if isinstance(error, RewardError) else RewardError(f"the reward pool failed: {error!r}")
            )
        self._fail_waiting(self._broken or RewardError("the reward pool is closed"), jobs)

    def _fail_waiting(self, error: RewardError, jobs: Sequence[_Job] = ()) -> None:
        waiting = list(jobs)
        while not self._queue.empty():
            waiting.append(self._queue.get_nowait())
        for job in waiting:
            if not job.done.done():
                job.done.set_exception(error)

    def _result(self, item: Item, outcome: Outcome) -> RewardResult:
        result = combine(outcome, self._cfg.components)
        if result.errors:
            self._report(item[0], result.errors)
        return result

    def _report(self, record: PromptRecord, errors: Mapping[str, str]) -> None:
        self._failures += 1
        text = "; ".join(f"{name} {reason}" for name, reason in errors.items())
        if self._cfg.on_error == "fail":
            raise RewardError(
                f"no reward for a response to prompt {record.id!r}: {text}; correct the verifier or the data, "
                "or set reward.on_error=mask to leave such samples out"
            )
        if self._failures <= _LOGGED_ERRORS:
            log.warning("no reward for a response to prompt %r (left out of training): %s", record.id, text)
        if self._failures == _LOGGED_ERRORS:
            log.warning("further such failures are only counted, as reward/errors")


def _make_inline(cfg: RewardConfig) -> Evaluator | None:
    """The verifiers to run in this process, or None when there are workers."""
    names = [component.name for component in cfg.components]
    for name in names:
        check_name(name)
    if cfg.workers:
        return None
    unsafe = [name for name in names if not is_inline_safe(name)]
    if unsafe:
        raise RewardError(
            f"reward.workers=0 runs verifiers in the controller, but {', '.join(unsafe)} could hang it; "
            "set reward.workers to 1 or more"
        )
    return Evaluator([(component.name, component.args) for component in cfg.components])


def _resolve(job: _Job, outcome: Outcome) -> None:
    if not job.done.done():  # its caller may have been cancelled
        job.done.set_result(outcome)
