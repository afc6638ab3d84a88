"""A run of the scheduler without engines: a clock that jumps, groups that take as long as told, a trainer. No tests."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from megatron_rl.algorithms.staleness import token_versions
from megatron_rl.config import Config
from megatron_rl.data import PromptCursor
from megatron_rl.rollout.pace import Pace
from megatron_rl.rollout.pool import GroupPool
from megatron_rl.rollout.sample import Group, Span
from megatron_rl.rollout.scheduler import Scheduler
from megatron_rl.rollout.wire import pack_groups, unpack_groups
from tests.least import least

T = TypeVar("T")
NEVER = 10**9
"""Tokens of a response that has no end."""


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting, time passes."""

    loop: JumpingLoop

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events:
            assert timeout is not None, "everybody waits for somebody else"
            self.loop.now += timeout
        return events


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next moment at which something is due."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, in no time."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(work)


def config(steps: int, deterministic: bool = False, **rollout: Any) -> Config:
    """A small run."""
    rollout = {"groups_per_step": 4, "group_size": 2, "step_timeout_s": 1e5, **rollout}
    return least(steps=steps, deterministic=deterministic, rollout=rollout)


class SlowMaker:
    """Groups whose samples grow by a token a second, in whole segments, with the weights of that moment.

    Args:
        lengths: tokens of each sample of a group that is started; called anew when it is started anew.
        right: how many of its samples are right.
        segment: tokens.
    """

    def __init__(
        self, lengths: Callable[[int], Collection[int]], right: Callable[[int], int], segment: int = 7
    ) -> None:
        self._lengths, self._right, self._segment = lengths, right, segment
        self._wanted: dict[int, list[int]] = {}
        self._stops: dict[int, asyncio.Event] = {}
        self._suspended: set[int] = set()
        self.in_flight: dict[int, Group] = {}
        self.version = 0
        self.busiest = 0

    async def make(self, group_id: int, record_index: int, partial: Group | None, version: int) -> Group:
        if partial is None or group_id not in self._wanted:
            self._wanted[group_id] = list(self._lengths(group_id))
        group = partial or Group.start(
            group_id, f"p{record_index}", np.arange(3), len(self._wanted[group_id]), run_seed=0, version=version,
            temperature=1.0,
        )  # fmt: skip
        stop = self._stops[group_id] = asyncio.Event()
        self.in_flight[group_id] = group
        self.busiest = max(self.busiest, len(self.in_flight))
        try:
            while group.unfinished and not (stop.is_set() or group_id in self._suspended):
                await self._grow(group, stop)
            if not group.unfinished:
                for k, sample in enumerate(group.samples):
                    sample.score(float(k < self._right(group_id)), float(k < self._right(group_id)), {})
            return group
        finally:
            del self.in_flight[group_id], self._stops[group_id]
            self._suspended.discard(group_id)

    async def _grow(self, group: Group, stop: asyncio.Event) -> None:
        began = asyncio.get_running_loop().time()
        wanted = self._wanted[group.id]
        left = min(n - s.response_length for n, s in zip(wanted, group.samples, strict=True) if not s.finished)
        try:
            async with asyncio.timeout(min(self._segment, max(left, 0))):
                await stop.wait()
        except TimeoutError:
            pass
        grown = round(asyncio.get_running_loop().time() - began)
        for length, sample in zip(wanted, group.samples, strict=True):
            count = min(grown, length - sample.response_length)
            if not sample.finished and count > 0:
                sample.append([1] * count, [-1.0] * count, [Span(self.version, 0, count)])
            if not sample.finished and sample.response_length >= length:
                sample.finish("stop")

    def suspend(self, ids: Collection[int]) -> None:
        for group_id in ids:
            self._suspended.add(group_id)
            if group_id in self._stops:
                self._stops[group_id].set()


@dataclass
class Trained:
    """One step as the trainer saw it."""

    step: int
    ids: list[int]
    retired: list[int]
    waited: float
    """Seconds from the start of the step to its batch."""
    held: float
    """Seconds from the end of training until the engines might be updated."""
    metrics: dict[str, float]
    staleness: list[np.ndarray]
    """Ages of all tokens, by sample, and those in the loss."""
    trained_staleness: list[np.ndarray]
    lengths: list[int]


@dataclass
class Run:
    """A scheduler, its groups and a trainer who takes `train_s` for a step and `update_s` for new weights."""

    cfg: Config
    maker: SlowMaker
    prompts: int = 1000
    train_s: float = 20.0
    update_s: float = 1.0
    steps: list[Trained] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = self.new()

    def new(self) -> Scheduler:
        pace = Pace(self.cfg)
        return Scheduler(
            self.cfg, GroupPool(PromptCursor(self.prompts, seed=0), pace.capacity, pace.refill), self.maker
        )

    async def train(self, last: int | None = None) -> list[Trained]:
        """Play the trainer to before step `last`."""
        loop, clock = asyncio.create_task(self.scheduler.run()), asyncio.get_running_loop()
        try:
            for step in range(self.scheduler.progress.step, last or self.cfg.steps):
                began = clock.time()
                self.scheduler.publish(step)
                await self._until(lambda: self.scheduler.progress.status != "generating")
                assert self.scheduler.progress.status == "ready", self.scheduler.progress.message
                found = self._look(step, clock.time() - began)
                await self._pass(self.train_s)
                ended = clock.time()
                await self._until(lambda s=step: self.scheduler.update_status(s + 1)[0] != "waiting")
                assert self.scheduler.update_status(step + 1)[0] == "ready", self.scheduler.progress.message
                found.held = clock.time() - ended
                if self.cfg.rollout.mode != "async":
                    assert not self.maker.in_flight, "the engines were updated under what runs"
                await self._pass(self.update_s)
                self.maker.version = step + 1
                found.retired = [group.id for group in self.scheduler.retire(step)]
                self.steps.append(found)
        finally:
            self.scheduler.stop()
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
        return self.steps

    def restart(self) -> None:
        """What a killed controller is after its state was restored, as it is now."""
        state, groups = self.scheduler.state_dict()
        arrays, values = pack_groups(groups)
        self.scheduler = self.new()
        self.scheduler.load_state_dict(state, unpack_groups(arrays, values))

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._pass(0.5)

    async def _pass(self, seconds: float) -> None:
        """Time goes by, and the books are looked at."""
        await asyncio.sleep(seconds)
        pool = self.scheduler.pool
        ledger = pool.ledger
        assert ledger["drawn"] == sum(count for name, count in ledger.items() if name != "drawn")
        assert pool.alive <= pool.capacity
        books, kept = pool.state_dict()
        settled = [i for step in self.steps for i in step.retired]
        finished = [group.id for group in kept if group.id not in books["partial"]]
        assert sorted([*settled, *books["waiting"], *finished]) == list(range(ledger["drawn"]))

    def _look(self, step: int, waited: float) -> Trained:
        batch = self.scheduler.batch(step)
        samples = [sample for group in batch for sample in group.samples]
        assert all(sample.finished for sample in samples)
        ages = [step - token_versions(sample.spans) for sample in samples]
        return Trained(
            step,
            ids=[group.id for group in batch],
            retired=[],
            waited=waited,
            held=0.0,
            metrics=self.scheduler.progress.metrics,
            staleness=ages,
            trained_staleness=[age[s.loss_mask] for age, s in zip(ages, samples, strict=True)],
            lengths=[sample.response_length for sample in samples],
        )


def ks_p_value(a: Collection[float], b: Collection[float]) -> float:
    """Two-sample Kolmogorov-Smirnov test: probability of such a distance when both are of one distribution."""
    first, second = np.sort(np.array(a)), np.sort(np.array(b))
    points = np.concatenate([first, second])
    shares = [np.searchsorted(x, points, side="right") / len(x) for x in (first, second)]
    distance = float(np.max(np.abs(shares[0] - shares[1])))
    scale = np.sqrt(len(first) * len(second) / (len(first) + len(second)))
    terms = [(-1) ** (k - 1) * np.exp(-2 * (k * distance * scale) ** 2) for k in range(1, 101)]
    return float(np.clip(2 * sum(terms), 0, 1)) if distance * scale > 0.2 else 1.0
