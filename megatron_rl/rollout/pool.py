"""Which groups are alive, and what became of every prompt drawn: admission and the ledger. Nothing waits or sends here.

    waiting --admit--> in flight --finish--> finished --retire--> trained | filtered
       ^ ^___resume____^ |  |                    |
       | '-----suspend---'  |                    |
       '----give_back-------'--------------------'

At most `capacity` groups are alive, and a slot is freed only when its group was trained, dropped or given back: this
bounds how old a sample can be when it is trained on, by construction. A suspended group is a waiting prompt with what
was generated for it so far (its partial); it keeps its slot. A group's id is the number of its prompt's draw in the
run, so ids are stable over restarts and each appears once along a run's lineage.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.data import PromptCursor

from .sample import Group


class GroupPool:
    """Draws prompts and keeps the books.

    Args:
        cursor: the order of prompts; one draw is one group.
        capacity: groups alive at once, see `config.rollout.capacity_of`.
        drops_uninformative: groups whose raw correctness does not vary free their slot as soon as they are finished.

    >>> pool = GroupPool(PromptCursor(10, seed=0), capacity=2, drops_uninformative=True)
    >>> pool.admit(), pool.admit(), pool.admit()  # the third must wait for a slot
    (0, 1, None)
    >>> pool.give_back([0])
    >>> pool.admit(), pool.ledger["drawn"], pool.ledger["in_flight"]
    (0, 2, 2)
    """

    def __init__(self, cursor: PromptCursor, capacity: int, drops_uninformative: bool) -> None:
        self.cursor, self.capacity = cursor, capacity
        self._drops_uninformative = drops_uninformative
        self._waiting: list[int] = []
        self.partials: dict[int, Group] = {}
        self._by_age: list[tuple[int, int]] = []
        """Heap of (oldest version, id) of the partials: a minimum over all samples for each one would be quadratic."""
        self.in_flight: set[int] = set()
        self.finished: dict[int, Group] = {}
        self._usable: set[int] = set()
        self._trained = self._filtered = 0

    def usable(self, group: Group) -> bool:
        """Whether a finished group may be part of a batch."""
        return group.informative or not self._drops_uninformative

    @property
    def usable_count(self) -> int:
        """Finished groups that may be part of a batch."""
        return len(self._usable)

    @property
    def alive(self) -> int:
        """Slots taken."""
        return len(self.in_flight) + len(self.partials) + self.usable_count

    @property
    def ledger(self) -> dict[str, int]:
        """`drawn` is the sum of the others, always."""
        return {
            "drawn": self.cursor.drawn,
            "trained": self._trained,
            "filtered": self._filtered,
            "waiting": len(self._waiting) + len(self.partials),
            "in_flight": len(self.in_flight),
            "finished": len(self.finished),
        }

    def admit(self) -> int | None:
        """Take a slot: the smallest id given back, else a new draw. None when no slot is free."""
        if self.alive >= self.capacity:
            return None
        if self._waiting:
            group_id = heapq.heappop(self._waiting)
        else:
            group_id = self.cursor.drawn
            self.cursor.next(1)
        self.in_flight.add(group_id)
        return group_id

    def resume(self) -> Group | None:
        """Take the suspended group with the oldest tokens to work again; None without one."""
        if not self.partials:
            return None
        _, group_id = heapq.heappop(self._by_age)
        group = self.partials.pop(group_id)
        self.in_flight.add(group.id)
        return group

    def finish(self, group: Group) -> None:
        """All samples of the group are generated and scored."""
        self.in_flight.remove(group.id)
        self._keep(group)

    def _keep(self, group: Group) -> None:
        self.finished[group.id] = group
        if self.usable(group):
            self._usable.add(group.id)

    def suspend(self, group: Group) -> None:
        """The group was stopped; what it has is kept for `resume`."""
        self.in_flight.remove(group.id)
        self.partials[group.id] = group
        heapq.heappush(self._by_age, (group.version_first, group.id))

    def give_back(self, ids: Iterable[int]) -> None:
        """These prompts wait again; what was generated for them is dropped."""
        suspended = len(self.partials)
        for group_id in ids:
            if self.finished.pop(group_id, None) is None and self.partials.pop(group_id, None) is None:
                self.in_flight.remove(group_id)
            self._usable.discard(group_id)
            heapq.heappush(self._waiting, group_id)
        if len(self.partials) < suspended:
            self._by_age = [entry for entry in self._by_age if entry[1] in self.partials]
            heapq.heapify(self._by_age)

    def expire(self, too_old: Callable[[Group], bool], but: Collection[int] = ()) -> list[int]:
        """Give back finished and suspended groups that are too old, `but` these; returns their ids."""
        kept = [*self.finished.values(), *self.partials.values()]
        stale = [group.id for group in kept if group.id not in but and too_old(group)]
        self.give_back(stale)
        return stale

    def retire(self, trained: Collection[int], filtered: Collection[int]) -> None:
        """These groups are done with."""
        for group_id in (*trained, *filtered):
            del self.finished[group_id]
            self._usable.discard(group_id)
        self._trained += len(trained)
        self._filtered += len(filtered)

    def record_index(self, group_id: int) -> int:
        """Position in the dataset of the group's prompt."""
        return self.cursor.index_at(group_id)

    def state_dict(self, at_work: Iterable[Group] = ()) -> tuple[dict[str, Any], list[Group]]:
        """JSON-able books, and the finished and suspended groups.

        Of what is in flight, the groups `at_work` are kept with what they have; the others will be generated anew.
        """
        partials = [*self.partials.values(), *at_work]
        books = {
            "cursor": dict(self.cursor.state_dict()),
            "waiting": sorted([*self._waiting, *self.partials, *self.in_flight]),
            "partial": [group.id for group in partials],
            "trained": self._trained,
            "filtered": self._filtered,
        }
        return books, [*self.finished.values(), *partials]

    def load_state_dict(self, books: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """Go on from a saved state. Raises DataError when it belongs to other prompts or another order."""
        self.cursor.load_state_dict(books["cursor"])
        partial = set(books["partial"])
        self._waiting = sorted(set(books["waiting"]) - partial)
        self.partials = {group.id: group for group in groups if group.id in partial}
        self._by_age = sorted((group.version_first, group.id) for group in self.partials.values())
        self.in_flight = set()
        self.finished, self._usable = {}, set()
        for group in groups:
            if group.id not in partial:
                self._keep(group)
        self._trained, self._filtered = books["trained"], books["filtered"]


@dataclass(frozen=True)
class Choice:
    """Ids of one training batch, ascending, and of the groups that were looked at and dropped."""

    batch: list[int]
    filtered: list[int]


def choose(usable: Mapping[int, bool], in_flight: Collection[int], needed: int, in_order: bool) -> Choice | None:
    """The batch of `needed` usable groups, or None while it is not decided.

    `usable` maps finished ids, in the order in which they are to be used, to whether they may be in a batch.

    Without `in_order`, the first `needed` usable ones are taken: no waiting for stragglers, but where those are given
    back, short responses are favoured. `in_order` takes the smallest ids and waits for every smaller id still in
    flight: what is chosen, and what counts as filtered, then does not depend on timing.

    >>> choose({2: True, 0: False}, in_flight={1}, needed=1, in_order=False)
    Choice(batch=[2], filtered=[0])
    >>> choose({2: True, 0: False}, in_flight={1}, needed=1, in_order=True) is None
    True
    """
    if not in_order:
        taken = [i for i, ok in usable.items() if ok][:needed]
        if len(taken) < needed:
            return None
        return Choice(sorted(taken), sorted(i for i, ok in usable.items() if not ok))
    horizon = min(in_flight, default=math.inf)
    batch: list[int] = []
    filtered: list[int] = []
    for group_id in sorted(usable):
        if group_id > horizon or len(batch) == needed:
            break
        (batch if usable[group_id] else filtered).append(group_id)
    return Choice(batch, filtered) if len(batch) == needed else None
