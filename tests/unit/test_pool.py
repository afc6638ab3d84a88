"""Admission, choice and the ledger: a drawn prompt is one of trained, filtered, waiting, in flight, finished."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_rl.config.rollout import capacity_of
from megatron_rl.data import DataError, PromptCursor
from megatron_rl.rollout.pace import groups_to_start
from megatron_rl.rollout.pool import GroupPool, choose
from megatron_rl.rollout.sample import Group, Span


def finished_group(group_id: int, informative: bool, version: int = 0) -> Group:
    group = Group.start(group_id, "p", np.arange(2), 2, run_seed=0, version=version, temperature=1.0)
    for k, sample in enumerate(group.samples):
        sample.append([1], [-1.0], [Span(version, 0, 1)])
        sample.finish("stop")
        sample.score(float(k and informative), float(k and informative), {})
    return group


def partial_group(group_id: int, version: int = 0) -> Group:
    group = Group.start(group_id, "p", np.arange(2), 2, run_seed=0, version=version, temperature=1.0)
    group.samples[0].append([1], [-1.0], [Span(version, 0, 1)])
    return group


class PoolMachine(RuleBasedStateMachine):
    """Does anything that the scheduler may do, in any order."""

    @initialize(refill=st.booleans(), capacity=st.integers(1, 6))
    def start(self, refill: bool, capacity: int) -> None:
        self.pool = GroupPool(PromptCursor(4, seed=1), capacity, refill)
        self.ended: list[int] = []

    @rule()
    def admit(self) -> None:
        before = self.pool.alive
        group_id = self.pool.admit()
        assert (group_id is None) == (before >= self.pool.capacity)

    @precondition(lambda self: self.pool.in_flight)
    @rule(data=st.data(), informative=st.booleans())
    def finish(self, data: st.DataObject, informative: bool) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.pool.in_flight)))
        self.pool.finish(finished_group(group_id, informative))

    @precondition(lambda self: self.pool.in_flight or self.pool.finished or self.pool.partials)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        drawn = sorted([*self.pool.in_flight, *self.pool.finished, *self.pool.partials])
        self.pool.give_back([data.draw(st.sampled_from(drawn))])

    @precondition(lambda self: self.pool.finished)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.pool.finished)), unique=True, min_size=1))
        cut = data.draw(st.integers(0, len(ids)))
        self.pool.retire(ids[:cut], ids[cut:])
        self.ended += ids

    @rule()
    def expire_everything(self) -> None:
        self.pool.expire(lambda group: True)
        assert not self.pool.finished
        assert not self.pool.partials

    @precondition(lambda self: self.pool.in_flight)
    @rule(data=st.data(), version=st.integers(0, 3))
    def suspend(self, data: st.DataObject, version: int) -> None:
        self.pool.suspend(partial_group(data.draw(st.sampled_from(sorted(self.pool.in_flight))), version))

    @rule()
    def resume(self) -> None:
        before = set(self.pool.partials)
        partials = list(self.pool.partials.values())
        group = self.pool.resume()
        assert (group is None) == (not before)
        assert group is None or group.id in before & self.pool.in_flight
        assert group is None or group is min(partials, key=lambda g: (g.version_first, g.id))

    @rule(data=st.data())
    def restart_from_a_checkpoint(self, data: st.DataObject) -> None:
        at_work = sorted(self.pool.in_flight)
        kept = data.draw(st.lists(st.sampled_from(at_work), unique=True)) if at_work else []
        expected = {*self.pool.partials, *kept}
        books, groups = self.pool.state_dict([partial_group(i) for i in kept])
        other = GroupPool(PromptCursor(4, seed=1), self.pool.capacity, refill_of(self.pool))
        other.load_state_dict(books, groups)
        assert not other.in_flight
        assert set(other.partials) == expected
        assert other.usable_count == self.pool.usable_count
        self.pool = other

    @invariant()
    def the_ledger_adds_up(self) -> None:
        ledger = self.pool.ledger
        assert ledger["drawn"] == sum(count for name, count in ledger.items() if name != "drawn")

    @invariant()
    def usable_groups_are_counted(self) -> None:
        assert self.pool.usable_count == sum(map(self.pool.usable, self.pool.finished.values()))

    @invariant()
    def no_group_is_lost_or_doubled(self) -> None:
        books, _ = self.pool.state_dict()
        everywhere = [*self.ended, *books["waiting"], *self.pool.finished]
        assert sorted(everywhere) == list(range(self.pool.cursor.drawn))


def refill_of(pool: GroupPool) -> bool:
    return not pool.usable(finished_group(0, informative=False))


TestPoolNeverLosesAPrompt = PoolMachine.TestCase


def test_no_more_groups_are_alive_than_capacity_and_dropped_ones_make_room():
    pool = GroupPool(PromptCursor(100, seed=0), capacity_of(2, 1.5, 0), drops_uninformative=True)
    assert [pool.admit() for _ in range(4)] == [0, 1, 2, None]
    pool.finish(finished_group(0, informative=True))
    assert pool.admit() is None
    pool.finish(finished_group(1, informative=False))
    assert pool.admit() == 3


def test_prompts_that_were_given_back_come_first():
    pool = GroupPool(PromptCursor(100, seed=0), 3, drops_uninformative=False)
    ids = [pool.admit() for _ in range(3)]
    pool.give_back([2, 0])
    assert ids == [0, 1, 2]
    assert [pool.admit(), pool.admit()] == [0, 2]


def test_to_resume_all_groups_looks_at_each_of_them_a_few_times_only(monkeypatch: pytest.MonkeyPatch):
    looks, plain = [], Group.version_first.fget
    monkeypatch.setattr(Group, "version_first", property(lambda group: looks.append(group.id) or plain(group)))
    pool = GroupPool(PromptCursor(100, seed=0), 100, drops_uninformative=False)
    versions = [(7 * i) % 5 for i in range(100)]
    for version in versions:
        pool.suspend(partial_group(pool.admit(), version))
    pool.give_back([3, 50])
    resumed = [group.id for group in iter(pool.resume, None)]
    assert resumed == sorted(({*range(100)} - {3, 50}), key=lambda i: (versions[i], i))
    assert len(looks) <= 2 * 100


def test_groups_of_older_weights_expire_and_fresh_ones_stay():
    pool = GroupPool(PromptCursor(100, seed=0), 9, drops_uninformative=False)
    for version in (0, 1, 2):
        group_id = pool.admit()
        pool.finish(finished_group(group_id, True, version))
    assert pool.expire(lambda group: group.version_first < 1) == [0]
    assert sorted(pool.finished) == [1, 2]


def test_a_saved_pool_is_refused_for_other_prompts():
    books, groups = GroupPool(PromptCursor(5, seed=0, fingerprint="a"), 2, False).state_dict()
    with pytest.raises(DataError, match="fingerprint"):
        GroupPool(PromptCursor(5, seed=0, fingerprint="b"), 2, False).load_state_dict(books, groups)


arrivals = st.lists(st.booleans(), min_size=1, max_size=12)


@given(usable=arrivals, needed=st.integers(1, 6), data=st.data())
def test_in_order_the_choice_does_not_depend_on_who_finishes_first(usable, needed, data):
    """Decided at any moment at which it can be, it is what it would be with everything finished."""
    everything = choose(dict(enumerate(usable)), (), needed, in_order=True)
    order = data.draw(st.permutations(range(len(usable))))
    for done in range(len(order) + 1):
        finished = {i: usable[i] for i in order[:done]}
        choice = choose(finished, order[done:], needed, in_order=True)
        assert choice in (None, everything)
    assert choice == everything


@given(usable=arrivals, needed=st.integers(1, 6), in_order=st.booleans())
def test_a_choice_has_exactly_as_many_usable_groups_as_needed(usable, needed, in_order):
    choice = choose(dict(enumerate(usable)), (), needed, in_order)
    assert (choice is None) == (sum(usable) < needed)
    if choice is not None:
        assert len(choice.batch) == needed
        assert all(usable[i] for i in choice.batch)
        assert not any(usable[i] for i in choice.filtered)
        assert choice.batch == sorted(choice.batch)


@given(
    needed=st.integers(1, 40),
    oversample=st.floats(1, 3),
    usable=st.integers(0, 60),
    dropped=st.integers(0, 200),
    in_flight=st.integers(0, 60),
)
def test_refilling_never_exceeds_the_capacity_and_never_stands_still_with_groups_missing(
    needed, oversample, usable, dropped, in_flight
):
    capacity = capacity_of(needed, oversample, 0)
    usable, in_flight = min(usable, capacity), min(in_flight, capacity)
    count = groups_to_start(
        needed=needed,
        usable=usable,
        finished=usable + dropped,
        in_flight=in_flight,
        capacity=capacity,
        oversample=oversample,
        refill=True,
    )
    assert count >= 0
    assert usable + in_flight + count <= max(capacity, usable + in_flight)
    if usable < needed and not in_flight:
        assert count >= 1


def test_without_refill_exactly_the_missing_groups_are_started():
    settings = {"needed": 8, "finished": 3, "capacity": 16, "oversample": 2.0, "refill": False}
    assert groups_to_start(usable=3, in_flight=0, **settings) == 5
    assert groups_to_start(usable=3, in_flight=5, **settings) == 0
