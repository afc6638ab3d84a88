"""Partial rollouts, one step off, async: nothing lost, nothing older than allowed, nobody waits for a straggler.

Groups take as long as told and a clock that jumps lets hours pass in no time (`scheduling_rig`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rollout.pace import Pace
from megatron_rl.rollout.pool import GroupPool
from megatron_rl.rollout.progress import StepConflict
from megatron_rl.rollout.sample import Group, Sample

from .scheduling_rig import NEVER, Run, SlowMaker, config, ks_p_value, run

MODES = {
    "sync": {},
    "partial": {"partial_rollouts": True},
    "one_step_off": {"mode": "one_step_off"},
    "one_step_off, partial": {"mode": "one_step_off", "partial_rollouts": True},
    "async": {"mode": "async"},
}
KEEPING = [name for name in MODES if "partial" in name or name == "async"]


def drawn(seed: int, median: float = 12.0, spread: float = 0.9, size: int = 2) -> Callable[[int], list[int]]:
    """Long-tailed lengths, other ones each time."""
    dice = random.Random(seed)
    return lambda _: [1 + int(dice.lognormvariate(np.log(median), spread)) for _ in range(size)]


def settings_of(mode: str, staleness: int, policy: str, **more: Any) -> dict[str, Any]:
    off_policy = {} if mode == "sync" else {"max_staleness": staleness, "stale_policy": policy}
    return {**MODES[mode], **off_policy, **more}


@pytest.mark.parametrize(("mode", "batches"), [("sync", [1, 1, 1]), ("one_step_off", [1, 2, 1]), ("async", [3, 3, 1])])
def test_batches_that_are_wanted_before_and_behind_a_choice_and_behind_the_last_one(mode, batches):
    pace = Pace(config(10, **settings_of(mode, 2, "drop")))
    assert [pace.batches(3, chosen=False), pace.batches(3, chosen=True), pace.batches(9, chosen=True)] == batches


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(sorted(MODES)),
    policy=st.sampled_from(["drop", "mask_stale_tokens", "keep_with_correction"]),
    staleness=st.integers(1, 3),
    sampling=st.sampled_from(["off", "refill", "mask"]),
    oversample=st.sampled_from([1.0, 1.5, 2.0]),
    seed=st.integers(0, 2**16),
    train_s=st.sampled_from([0.0, 5.0, 100.0]),
    restarts=st.sets(st.integers(1, 5), max_size=2),
)
def test_every_step_has_its_groups_and_every_prompt_one_fate(
    mode, policy, staleness, sampling, oversample, seed, train_s, restarts
):
    """`Run` looks at the books all the time; here is what holds of the batches."""
    rollout = settings_of(mode, staleness, policy, dynamic_sampling=sampling, oversample=oversample)
    dice = random.Random(seed)
    rights = [dice.choice([0, 1, 1]) for _ in range(1000)]
    maker = SlowMaker(drawn(seed), lambda i: rights[i % 1000])
    played = Run(config(6, **rollout), maker, prompts=7, train_s=train_s)

    async def play() -> None:
        for stop in sorted(restarts):
            await played.train(stop)
            played.restart()
        await played.train()

    run(play())
    assert [len(step.ids) for step in played.steps] == [4] * 6
    retired = [i for step in played.steps for i in step.retired]
    assert len(retired) == len(set(retired))
    limit = 0 if mode == "sync" else staleness
    for step in played.steps:
        assert min(age.min() for age in step.staleness) >= 0
        trained = max((age.max() for age in step.trained_staleness if len(age)), default=0)
        assert trained <= limit or policy == "keep_with_correction"
        if policy == "drop":
            assert max(age.max() for age in step.staleness) <= limit
    assert maker.busiest <= played.scheduler.pool.capacity


def test_responses_that_end_leave_their_places_though_their_groups_go_on():
    at_work: list[int] = []

    class Watched(SlowMaker):
        async def make(self, *words: Any) -> Group:
            at_work.append(sum(len(group.unfinished) for group in self.in_flight.values()))
            return await super().make(*words)

    dice = random.Random(1)
    maker = Watched(lambda _: (dice.randint(1, 4), dice.randint(20, 60)), lambda _: 1, segment=1)
    settings_ = {"partial_rollouts": True, "oversample": 2.0, "stale_policy": "keep_with_correction"}
    played = Run(config(8, **settings_), maker)
    run(played.train())
    places = played.scheduler.pace.round * played.cfg.rollout.group_size
    assert max(at_work) < places  # each time a group began, the places for it were free
    assert maker.busiest > 1.5 * played.scheduler.pace.round
    assert maker.busiest <= played.scheduler.pool.capacity


@pytest.mark.parametrize("policy", ["drop", "mask_stale_tokens", "keep_with_correction"])
@pytest.mark.parametrize("mode", KEEPING)
def test_groups_that_never_finish_do_not_stop_the_run(mode, policy):
    usual = drawn(3)
    maker = SlowMaker(lambda i: [NEVER, 5] if i in (1, 6) else usual(i), lambda _: 1)
    played = Run(config(8, **settings_of(mode, 2, policy)), maker)
    run(played.train())
    assert [step.step for step in played.steps] == list(range(8))
    assert not {1, 6} & {i for step in played.steps for i in step.ids}
    books, _ = played.scheduler.pool.state_dict()
    assert {1, 6} <= set(books["waiting"])


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_where_nothing_is_kept_a_group_that_never_finishes_ends_the_run_at_the_deadline(mode):
    maker = SlowMaker(lambda i: [NEVER, 5] if i == 1 else [5, 5], lambda _: 1)
    played = Run(config(8, **settings_of(mode, 2, "drop", step_timeout_s=500)), maker)
    with pytest.raises(AssertionError, match=r"3 of 4 groups: not enough groups within 500 s \(rollout.step_timeout_s"):
        run(played.train())


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"group_size": 3}])
def test_what_another_temperature_or_size_has_begun_is_generated_anew(change):
    rollout = {"partial_rollouts": True, "max_staleness": 3, "oversample": 2.0}
    played = Run(config(4, **rollout), SlowMaker(lambda i: [30, 30] if i == 0 else [10, 10], lambda _: 1))
    run(played.train(1))
    assert 0 in played.scheduler.pool.partials
    played.cfg = config(4, **rollout, **change)
    played.restart()
    pool = played.scheduler.pool
    assert not pool.partials
    assert 0 in pool.state_dict()[0]["waiting"]
    assert bool(pool.finished) == ("temperature" in change)


def test_what_a_complete_batch_leaves_unfinished_is_gone_on_with_token_by_token():
    maker = SlowMaker(lambda i: [30, 30] if i == 0 else [10, 10], lambda _: 1)
    played = Run(config(4, partial_rollouts=True, max_staleness=3, oversample=2.0), maker)
    run(played.train())
    whole = {i: step for step in played.steps for i in step.ids}[0]
    sample = whole.ids.index(0) * 2
    ages = whole.staleness[sample].tolist()
    assert ages == sorted(ages, reverse=True)
    assert len(ages) == 30
    assert len(set(ages)) > 2
    assert max(ages) == whole.step  # begun with the first weights
    assert whole.metrics["rollout/staleness_max"] == whole.step
    assert sum(step.metrics["rollout/resumed_tokens"] for step in played.steps) > 0


@pytest.mark.parametrize(("mode", "most"), [("one_step_off", 1), ("async", 2)])
def test_generation_hides_behind_training(mode, most):
    """A batch takes 20 s and training 30: after the first one the trainer waits for nothing."""
    maker = SlowMaker(lambda _: [20, 20], lambda _: 1)
    played = Run(config(6, mode=mode), maker, train_s=30)
    run(played.train())
    assert [step.waited + step.held <= 1.0 for step in played.steps] == [False] + [True] * 5
    ages = [max(age.max() for age in step.staleness) for step in played.steps]
    assert ages[0] == 0
    assert max(ages) <= most


def test_async_updates_the_engines_under_what_runs_and_a_response_has_tokens_of_several_weights():
    maker = SlowMaker(lambda _: [50, 50], lambda _: 1)
    played = Run(config(8, mode="async", max_staleness=3), maker, train_s=10)
    run(played.train())
    assert max(len(set(age.tolist())) for step in played.steps for age in step.staleness) > 1


def test_async_is_never_older_than_allowed_by_admission_alone():
    """Engines that are faster than the trainer fill all slots; what then waits longest is exactly as old as allowed."""
    maker = SlowMaker(lambda _: [2, 2], lambda _: 1)
    played = Run(config(9, mode="async", max_staleness=2, stale_policy="keep_with_correction"), maker, train_s=100)
    run(played.train())
    ages = [max(age.max() for age in step.staleness) for step in played.steps]
    assert ages == [0, 1, 2, 2, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("mode", KEEPING)
def test_too_old_groups_are_dropped_generated_anew_and_counted(mode):
    maker = SlowMaker(lambda i: [200, 5] if i % 5 == 0 else [10, 10], lambda _: 1)
    played = Run(config(12, **settings_of(mode, 1, "drop", oversample=2.0)), maker, train_s=10)
    run(played.train())
    assert sum(step.metrics["rollout/stale_groups_dropped"] for step in played.steps) > 0


def test_an_update_is_not_asked_for_before_the_batch_that_it_is_made_of():
    played = Run(config(3, mode="async"), SlowMaker(lambda _: [2, 2], lambda _: 1))
    with pytest.raises(StepConflict, match="step 0 is not ready"):
        played.scheduler.update_status(1)


def test_to_ask_for_an_update_looks_at_no_more_than_one_sample_of_a_group_at_work(monkeypatch):
    played = Run(config(3), SlowMaker(lambda _: [20, 20], lambda _: 1))
    looks, plain = [], Sample.finished.fget

    async def play() -> tuple[str, str]:
        loop = asyncio.create_task(played.scheduler.run())
        played.scheduler.publish(0)
        await asyncio.sleep(5)
        monkeypatch.setattr(played.scheduler, "ready", lambda step: None)
        with monkeypatch.context() as patch:
            patch.setattr(Sample, "finished", property(lambda sample: looks.append(sample.id) or plain(sample)))
            found = played.scheduler.update_status(1)
        loop.cancel()
        return found

    assert run(play()) == ("waiting", "4 groups at the engines, 4 missing in the next batch")
    assert len(looks) == len(set(looks)) == 4


def test_what_is_at_work_is_saved_with_its_segments_and_gone_on_with_after_a_kill():
    maker = SlowMaker(lambda _: [40, 40], lambda _: 1, segment=10)
    played = Run(config(3, mode="async", max_staleness=2), maker)

    async def play() -> tuple[int, int]:
        loop = asyncio.create_task(played.scheduler.run())
        played.scheduler.publish(0)
        await asyncio.sleep(25)
        played.restart()
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        kept = sum(s.response_length for g in played.scheduler.pool.partials.values() for s in g.samples)
        await played.train()
        return kept, sum(int(step.metrics["rollout/resumed_tokens"]) for step in played.steps)

    kept, resumed = run(play())
    assert kept == 12 * 2 * 20
    assert resumed == kept


def test_a_run_that_keeps_nothing_any_more_generates_saved_partials_anew():
    maker = SlowMaker(lambda _: [40, 40], lambda _: 1, segment=10)
    played = Run(config(3, mode="async", max_staleness=2), maker)

    async def play() -> None:
        loop = asyncio.create_task(played.scheduler.run())
        played.scheduler.publish(0)
        await asyncio.sleep(25)
        played.cfg = config(3)
        played.restart()
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await played.train()

    run(play())
    assert {int(age.max()) for step in played.steps for age in step.staleness} == {0}


LONG_TAIL = {"median": 12.0, "spread": 0.9}
"""p99 / p50 = exp(2.33 x 0.9), about 8."""


def trained_lengths(seed: int, steps: int = 52, skip: int = 20, **rollout: Any) -> list[int]:
    size = 4
    lengths = drawn(seed, **LONG_TAIL, size=size)
    values = {"groups_per_step": 16, "group_size": size, "dynamic_sampling": "refill", **rollout}
    played = Run(config(steps, **values), SlowMaker(lengths, lambda _: 1), prompts=10_000, train_s=10)
    run(played.train())
    return [length for step in played.steps[skip:] for length in step.lengths]


def of_all_groups(seed: int, count: int) -> list[int]:
    lengths = drawn(seed, **LONG_TAIL, size=4)
    return [length for _ in range(count // 4) for length in lengths(0)]


KEPT = {"max_staleness": 20, "stale_policy": "keep_with_correction"}


@pytest.mark.parametrize(
    "mode", [{"partial_rollouts": True, "oversample": 1.5}, {"mode": "async"}, {"mode": "one_step_off"}]
)
def test_in_the_steady_state_trained_samples_are_as_long_as_all_samples(mode):
    found = trained_lengths(1, **{**KEPT, **mode})
    assert len(found) >= 2000
    assert ks_p_value(found, of_all_groups(2, len(found))) > 0.01


def test_a_scheduler_that_throws_the_unfinished_away_fails_that_test(monkeypatch: pytest.MonkeyPatch):
    def forget(pool: GroupPool, group: Group) -> None:
        pool.give_back([group.id])

    monkeypatch.setattr(GroupPool, "suspend", forget)
    found = trained_lengths(1, **KEPT, partial_rollouts=True, oversample=1.5)
    assert ks_p_value(found, of_all_groups(2, len(found))) < 1e-6


def test_so_does_synchronous_oversampling_and_the_documentation_says_so():
    found = trained_lengths(1, oversample=1.5)
    assert ks_p_value(found, of_all_groups(2, len(found))) < 1e-6


def test_an_update_does_not_wait_for_verifiers():
    """The group that is being judged when its batch is complete has nothing at the engines any more."""
    verdict = asyncio.Event()

    class SlowVerifier(SlowMaker):
        async def make(self, group_id: int, record_index: int, partial: Group | None, version: int) -> Group:
            group = await super().make(group_id, record_index, partial, version)
            if group_id == 1:
                self.in_flight[group_id] = group
                await verdict.wait()
                del self.in_flight[group_id]
            return group

    played = Run(config(1, partial_rollouts=True, oversample=1.5), SlowVerifier(lambda _: [5, 5], lambda _: 1))

    async def play() -> tuple[str, str]:
        loop = asyncio.create_task(played.scheduler.run())
        played.scheduler.publish(0)
        await asyncio.sleep(50)
        found = played.scheduler.update_status(1)
        verdict.set()
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        return found

    assert run(play()) == ("ready", "")
