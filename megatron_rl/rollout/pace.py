"""How much is generated when: the modes of `rollout.mode` as rules on numbers. No group, no task and no clock here.

                   batches wanted at step k     while step k is trained on     new weights
    sync           the step's                   nothing runs                   when nothing runs
    one_step_off   the step's, then the next    the next batch                 when it is complete and nothing runs
    async          max_staleness + 1            everything goes on             at once, under what runs

With `keeps` (partial_rollouts, async), what a complete batch leaves unfinished is kept and goes on later; else its
prompts are generated anew.
"""

from __future__ import annotations

import math

from megatron_rl.config import Config
from megatron_rl.config.rollout import capacity_of


class Pace:
    """The rules of one run.

    Attributes:
        needed: groups of one batch.
        round: groups whose responses run at once for one batch, ceil(oversample x needed).
        capacity: groups alive at once.
        keeps: unfinished groups are suspended, not given back.
        refill: groups without a signal are replaced.
        never_halts: generation goes on through weight updates.
    """

    def __init__(self, cfg: Config) -> None:
        self._rollout, self._steps = cfg.rollout, cfg.steps
        self.needed, oversample = cfg.rollout.groups_per_step, cfg.rollout.oversample
        self.round = capacity_of(self.needed, oversample, 0)
        self.capacity = capacity_of(self.needed, oversample, cfg.rollout.max_staleness)
        self.never_halts = cfg.rollout.mode == "async"
        self.keeps = cfg.rollout.partial_rollouts or self.never_halts
        self.refill = cfg.rollout.dynamic_sampling == "refill"

    def batches(self, step: int, chosen: bool) -> int:
        """Batches that are wanted now, that of `step` included; `chosen`: it is there already."""
        if chosen and step + 1 >= self._steps:
            return 1
        wanted = {"sync": 1, "one_step_off": 2 if chosen else 1, "async": self._rollout.max_staleness + 1}
        return wanted[self._rollout.mode]

    def missing(self, step: int, chosen: bool, usable: int) -> int:
        """Groups still wanted when `usable` finished ones are there, those of a chosen batch among them; 0 = none."""
        return max(0, self.batches(step, chosen) * self.needed - usable)

    def to_start(self, step: int, chosen: bool, *, usable: int, finished: int, at_work: float, alive: int) -> float:
        """How many further groups are to run now, resumed ones or new ones; new ones need a free slot as well.

        What is kept costs nothing, so a run that keeps its unfinished groups has the responses of `round` of them at
        work until the batch is complete: a straggler takes one place, not its group's, and blocks nobody. Where they
        are given back, none is started that is not expected to be used (`groups_to_start`). `async` expects all to be
        used, within the slots: started beyond that, they would be too old when their turn comes.

        Args:
            usable, finished: finished groups that may be trained on, and all of them.
            at_work: groups that the responses at work would fill.
            alive: slots taken: at work, suspended, usable.
        """
        missing = self.missing(step, chosen, usable)
        if not missing:
            return 0
        if self.keeps and not self.never_halts:
            return max(0.0, self.round - at_work)
        batches = self.batches(step, chosen)
        return groups_to_start(
            needed=batches * self.needed,
            usable=usable,
            finished=finished,
            in_flight=alive - usable,
            capacity=batches * self.round,
            oversample=1.0 if self.never_halts else self._rollout.oversample,
            refill=self.refill,
        )


def groups_to_start(
    *, needed: int, usable: int, finished: int, in_flight: int, capacity: int, oversample: float, refill: bool
) -> int:
    """How many further groups to start now.

    Without refill, exactly the missing ones. With refill, enough that `oversample` times the missing ones are expected
    to be usable at the rate seen so far, within the free slots.

    >>> groups_to_start(needed=8, usable=0, finished=0, in_flight=0, capacity=12, oversample=1.5, refill=True)
    12
    >>> groups_to_start(needed=8, usable=6, finished=12, in_flight=0, capacity=12, oversample=1.0, refill=True)
    4
    """
    missing = needed - usable
    if missing <= 0:
        return 0
    if not refill:
        return max(0, missing - in_flight)
    rate = max(usable, 1) / max(finished, 1)
    wanted = math.ceil(oversample * missing / rate)
    return max(0, min(wanted - in_flight, capacity - usable - in_flight))
