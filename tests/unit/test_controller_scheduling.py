"""Which groups the scheduler starts, chooses and gives back, whatever order they finish in; no engine, no HTTP."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import numpy as np
import pytest

from megatron_rl.config import Config
from megatron_rl.data import PromptCursor
from megatron_rl.rollout.pace import Pace
from megatron_rl.rollout.pool import GroupPool
from megatron_rl.rollout.progress import StepConflict
from megatron_rl.rollout.protocol import EngineError
from megatron_rl.rollout.sample import Group, Span
from megatron_rl.rollout.scheduler import Scheduler
from tests.unit import scheduling_rig

SIZE = 4


def config(deterministic: bool = False, steps: int = 3, **rollout: Any) -> Config:
    return scheduling_rig.config(steps, deterministic, **{"group_size": SIZE, "step_timeout_s": 20.0, **rollout})


def judged(group_id: int, version: int, right: int) -> Group:
    group = Group.start(group_id, f"p{group_id}", np.arange(3), SIZE, run_seed=0, version=version, temperature=1.0)
    for k, sample in enumerate(group.samples):
        sample.append([1], [-1.0], [Span(version, 0, 1)])
        sample.finish("stop")
        sample.score(float(k < right), float(k < right), {})
    return group


class FakeMaker:
    """Runs `make(group id, record, version)` for every group."""

    def __init__(self, make: Callable[[int, int, int], Awaitable[Group]]) -> None:
        self._make = make
        self.in_flight: dict[int, Group] = {}

    async def make(self, group_id: int, record_index: int, partial: Group | None, version: int) -> Group:
        return await self._make(group_id, record_index, version)

    def suspend(self, ids: Collection[int]) -> None:
        raise AssertionError("synchronous runs suspend nothing")


def maker(right: Callable[[int], int], jitter: random.Random | None = None) -> Callable[..., Awaitable[Group]]:
    """Groups of which `right(group id)` samples are right, finished after a random moment."""

    async def make(group_id: int, record: int, version: int) -> Group:
        await asyncio.sleep(jitter.uniform(0, 0.003) if jitter else 0)
        return judged(group_id, version, right(group_id))

    return make


def scheduler_of(cfg: Config, make: Callable[..., Awaitable[Group]], prompts: int = 1000) -> Scheduler:
    pace = Pace(cfg)
    pool = GroupPool(PromptCursor(prompts, seed=0), pace.capacity, pace.refill)
    return Scheduler(cfg, pool, FakeMaker(make))


async def until_settled(scheduler: Scheduler, step: int) -> str:
    async with asyncio.timeout(20):
        while scheduler.progress.status in ("waiting", "generating"):
            await asyncio.sleep(0)
    assert scheduler.progress.step == step
    return scheduler.progress.status


def failure(scheduler: Scheduler) -> str:
    """The message with which step 0 fails, and nothing runs on."""

    async def run() -> int:
        loop = asyncio.create_task(scheduler.run())
        scheduler.publish(0)
        assert await until_settled(scheduler, 0) == "failed"
        await asyncio.wait_for(loop, 5)
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(run()) == 0
    return scheduler.progress.message


async def train(scheduler: Scheduler, first: int = 0, last: int | None = None) -> list[dict[str, Any]]:
    """Play the trainer from step `first` to before `last`: ids of each batch and of what was retired."""
    last = scheduler._cfg.steps if last is None else last
    loop = asyncio.create_task(scheduler.run())
    steps = []
    try:
        for step in range(first, last):
            scheduler.publish(step)
            assert await until_settled(scheduler, step) == "ready", scheduler.progress.message
            batch = scheduler.batch(step)
            assert {g.version_first for g in batch} == {step}, "a surplus of older weights was trained on"
            facts = {"batch": [g.id for g in batch], "informative": all(g.informative for g in batch)}
            facts |= {"metrics": scheduler.progress.metrics, "started": scheduler.progress.seen.started}
            await asyncio.sleep(0.01)  # what is not needed is ended beside the training
            facts["retired"] = [g.id for g in scheduler.retire(step)]
            steps.append(facts)
            ledger = scheduler.pool.ledger
            assert ledger["drawn"] == sum(count for name, count in ledger.items() if name != "drawn")
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
    return steps


def every_third(group_id: int) -> int:
    return 2 if group_id % 3 == 0 else (0 if group_id % 3 == 1 else SIZE)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("oversample", [1.0, 1.5, 3.0])
def test_refill_delivers_exactly_the_wanted_number_of_informative_groups(deterministic, oversample):
    cfg = config(deterministic, dynamic_sampling="refill", oversample=oversample, steps=4)
    scheduler = scheduler_of(cfg, maker(every_third, random.Random(1)))
    steps = asyncio.run(train(scheduler))
    assert [len(s["batch"]) for s in steps] == [4] * 4
    assert all(s["informative"] for s in steps)
    ended = [i for s in steps for i in s["retired"]]
    assert len(ended) == len(set(ended))
    assert scheduler.pool.ledger["trained"] == 16
    assert scheduler.pool.ledger["filtered"] == len(ended) - 16
    assert all(s["metrics"]["rollout/groups_dropped_fraction"] > 0 for s in steps)


def test_in_deterministic_mode_batches_do_not_depend_on_timing_and_use_up_prompts_in_order():
    def play(seed: int) -> list[Any]:
        cfg = config(True, dynamic_sampling="refill", oversample=2.0, steps=5)
        steps = asyncio.run(train(scheduler_of(cfg, maker(every_third, random.Random(seed)))))
        return [(s["batch"], s["retired"]) for s in steps]

    first = play(1)
    assert play(2) == play(3) == first
    assert [i for _, retired in first for i in retired] == list(range(first[-1][1][-1] + 1))


@pytest.mark.parametrize("mode", ["off", "mask"])
def test_without_refill_exactly_the_wanted_groups_are_started_and_all_are_kept(mode):
    scheduler = scheduler_of(config(dynamic_sampling=mode, oversample=2.0), maker(every_third, random.Random(0)))
    steps = asyncio.run(train(scheduler))
    assert [s["batch"] for s in steps] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [s["started"] for s in steps] == [4, 4, 4]
    dropped = [s["metrics"]["rollout/groups_dropped_fraction"] for s in steps]
    assert dropped == ([0, 0, 0] if mode == "off" else [0.5, 0.75, 0.75])


def test_prompts_start_anew_when_they_are_used_up():
    scheduler = scheduler_of(config(dynamic_sampling="off"), maker(lambda _: 1), prompts=3)
    records = [[scheduler.pool.record_index(i) for i in range(n, n + 3)] for n in (0, 3, 6)]
    asyncio.run(train(scheduler))
    assert [sorted(epoch) for epoch in records] == [[0, 1, 2]] * 3
    assert scheduler.pool.cursor.drawn == 4 * 3


def test_a_run_without_informative_groups_stops_and_shows_the_pass_rates():
    cfg = config(dynamic_sampling="refill", max_sample_rounds=3, oversample=1.5)
    scheduler = scheduler_of(cfg, maker(lambda i: SIZE if i % 2 else 0, random.Random(0)))
    message = failure(scheduler)
    assert "step 0: 0 of 4 groups" in message
    assert "rollout.max_sample_rounds=3" in message
    assert "0: 9, 1: 9" in message
    assert "rollout.dynamic_sampling=mask" in message
    assert scheduler.progress.seen.started == 3 * 6


def without_rewards() -> Callable[..., Awaitable[Group]]:
    async def make(group_id: int, record: int, version: int) -> Group:
        group = judged(group_id, version, 0)
        for sample in group.samples:
            sample.score(float("nan"), float("nan"), {})
        return group

    return make


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("off", "none of the 16 samples of the batch has a reward"),
        ("mask", "none of the 16 samples of the batch has a reward"),
        ("refill", "mean correctness seen (value: groups): nan: 8 (nan: a verifier or an environment failed"),
    ],
)
def test_a_step_in_which_every_verification_failed_ends_the_run(mode, expected):
    assert expected in failure(scheduler_of(config(dynamic_sampling=mode, max_sample_rounds=2), without_rewards()))


def fail_at(group_id: int, error: Exception) -> Callable[..., Awaitable[Group]]:
    async def make(mine: int, record: int, version: int) -> Group:
        if mine == group_id:
            raise error
        await asyncio.sleep(3600)
        raise AssertionError("unreachable")

    return make


def test_an_engine_that_fails_fails_the_step_with_its_message_and_nothing_runs_on():
    scheduler = scheduler_of(config(), fail_at(2, EngineError("engine http://x: gone")))
    assert failure(scheduler) == "step 0: 0 of 4 groups: engine http://x: gone"
    assert scheduler.pool.ledger["waiting"] == 4
    assert not scheduler.pool.in_flight


def test_a_step_that_takes_too_long_fails_and_says_which_deadline_it_was():
    message = failure(scheduler_of(config(step_timeout_s=0.1), fail_at(-1, ValueError())))
    assert "0 of 4 groups" in message
    assert "within 0.1 s (rollout.step_timeout_s)" in message


def test_what_was_not_needed_is_given_back_and_comes_first_in_the_next_step():
    """Two of six finish late: the step does not wait for them, and their prompts are not lost."""

    async def make(group_id: int, record: int, version: int) -> Group:
        if group_id in (0, 3) and version == 0:
            await asyncio.sleep(3600)
        return judged(group_id, version, 2)

    scheduler = scheduler_of(config(dynamic_sampling="refill", oversample=1.5, steps=2), make)
    steps = asyncio.run(train(scheduler))
    assert steps[0]["batch"] == [1, 2, 4, 5]
    assert {0, 3} <= set(steps[1]["batch"])


def test_weights_that_do_not_fit_the_step_are_refused():
    scheduler = scheduler_of(config(), maker(lambda _: 1))
    with pytest.raises(StepConflict, match="version 2 was published, but the controller is at step 0"):
        scheduler.publish(2)
    with pytest.raises(StepConflict, match=r"step 0 is not ready: the controller is at step 0 \(waiting\)"):
        scheduler.retire(0)


@pytest.mark.parametrize("ready_when_saved", [False, True])
def test_a_resumed_run_takes_the_batches_of_the_uninterrupted_one(ready_when_saved):
    """Saved between two steps, and with a step sampled but not trained on (a signal during training)."""
    cfg = config(True, dynamic_sampling="refill", oversample=1.5, steps=5)

    def fresh(seed: int) -> Scheduler:
        return scheduler_of(cfg, maker(every_third, random.Random(seed)), prompts=7)

    async def interrupted() -> list[dict[str, Any]]:
        first = fresh(1)
        steps = await train(first, last=2)
        if ready_when_saved:
            loop = asyncio.create_task(first.run())
            first.publish(2)
            await until_settled(first, 2)
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
        state, groups = first.state_dict()
        second = fresh(2)
        second.load_state_dict(state, groups)
        return steps + await train(second, first=2)

    whole = asyncio.run(train(fresh(3)))
    parts = asyncio.run(interrupted())
    assert [s["batch"] for s in parts] == [s["batch"] for s in whole]
    assert [s["retired"] for s in parts] == [s["retired"] for s in whole]


def test_a_state_is_refused_once_sampling_has_begun():
    scheduler = scheduler_of(config(), maker(lambda _: 1))
    state, groups = scheduler.state_dict()
    scheduler.publish(0)
    with pytest.raises(StepConflict, match="only into one that has just started"):
        scheduler.load_state_dict(state, groups)


def test_progress_is_told_while_a_step_is_sampled():
    release = asyncio.Event()

    async def make(group_id: int, record: int, version: int) -> Group:
        if group_id >= 2:
            await release.wait()
        return judged(group_id, version, 0 if group_id == 0 else 2)

    scheduler = scheduler_of(config(dynamic_sampling="refill"), make)

    async def run() -> dict[str, int]:
        loop = asyncio.create_task(scheduler.run())
        scheduler.publish(0)
        async with asyncio.timeout(5):
            while scheduler.progress.seen.finished < 2:
                await asyncio.sleep(0)
        counts = scheduler.counts()
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        return counts

    counts = asyncio.run(run())
    assert counts["groups_done"] == 1
    assert counts["groups_needed"] == 4
    assert counts["groups_dropped"] == 1
    assert counts["rounds"] >= 1
