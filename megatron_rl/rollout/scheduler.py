"""Which groups run when, and which become the batch of a step. No HTTP, no engine and no verifier is known here.

One loop, woken by every group that ends and every word of the trainer, of five verbs:

    take      groups that ended: finished, suspended with what they have, or given back
    choose    the batch of the step that the trainer is at, once its weights are on the engines
    expire    groups with tokens too old for the next batch: their prompts are generated anew
    halt      what the complete batches do not need: suspended, or given back
    start     what is missing: suspended groups first, then prompts given back, then new ones

How much is wanted when is a matter of the mode (`pace.py`). A batch is chosen only when the trainer is at its step, so
that the age of its tokens is known, and masked only then (`rollout.stale_policy`). Finished groups are used oldest
weights first. `controller.py` draws this loop among the others.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection
from typing import Any

from megatron_rl.config import Config

from .acceptance import (
    SamplingError,
    exhausted,
    mask_old_tokens,
    require_published_versions,
    require_rewards,
    require_started_version,
)
from .pace import Pace
from .pool import Choice, GroupPool, choose
from .progress import Maker, Status, StepConflict, StepProgress
from .sample import Group
from .seen import Ages, Seen, ages_of, choice_metrics, responses_at_work, staleness_of_batch, tokens_of

log = logging.getLogger(__name__)


class Scheduler:
    """Samples for the trainer, step after step.

    Args:
        cfg: the run.
        pool: prompts and groups.
        maker: generates and judges groups.
    """

    def __init__(self, cfg: Config, pool: GroupPool, maker: Maker) -> None:
        self._cfg, self.pool, self._maker, self.pace = cfg, pool, maker, Pace(cfg)
        self._tasks: dict[asyncio.Task[Group], int] = {}
        self._done: list[asyncio.Task[Group]] = []
        self._ending: set[int] = set()
        """In flight, and to be given back."""
        self._suspending: set[int] = set()
        self._version = -1
        self._seen = Seen()
        self._owed_since: float | None = None
        self._expired_below: int | None = None
        self._changed = asyncio.Event()
        self.progress = StepProgress(0, self._seen)

    # ---- the loop

    async def run(self) -> None:
        """Sample until the last step is trained on, or one fails."""
        try:
            while not self._over:
                self._changed.clear()
                self._take()
                self._choose()
                self._expire()
                self._halt()
                self._start()
                await self._wait()
        except Exception as error:
            step, done, needed = self.progress.step, self.counts()["groups_done"], self.pace.needed
            self.progress.status = "failed"
            self.progress.message = f"step {step}: {done} of {needed} groups: {error}"
            log.exception("%s", self.progress.message)
        finally:
            await self._drain()

    @property
    def _over(self) -> bool:
        return self.progress.step >= self._cfg.steps or self.progress.status in ("failed", "stopped")

    def _take(self) -> None:
        done, self._done = self._done, []
        for task in sorted(done, key=self._tasks.__getitem__):
            group_id = self._tasks.pop(task)
            self._suspending.discard(group_id)
            if group_id in self._ending or task.cancelled():
                self._ending.discard(group_id)
                self.pool.give_back([group_id])
            else:
                self._sort(task.result())

    def _sort(self, group: Group) -> None:
        require_started_version(group)
        if group.unfinished:
            self.pool.suspend(group)
            return
        self.pool.finish(group)
        self._seen.finish(group)
        if self._too_old(group):  # it was being judged when the others like it went
            self.pool.give_back([group.id])
            self._seen.stale_groups += 1

    def _choose(self) -> None:
        progress = self.progress
        if progress.choice is not None or not self._published or self.pool.usable_count < self.pace.needed:
            return
        by_age = sorted(self.pool.finished.values(), key=lambda group: group.version_first)
        usable = {group.id: self.pool.usable(group) for group in by_age if not self._too_old(group)}
        choice = choose(usable, self.pool.in_flight, self.pace.needed, in_order=self._cfg.deterministic)
        if choice is None:
            return
        groups = [self.pool.finished[i] for i in choice.batch]
        require_published_versions(groups, progress.step)
        require_rewards(groups)
        ages = ages_of(groups, progress.step)
        masked = mask_old_tokens(groups, self._cfg.rollout, progress.step)
        progress.choice, progress.status = choice, "ready"
        progress.metrics = self._measure(choice, groups, ages, masked)
        log.info("step %d: ready, %s", progress.step, self.counts())
        self._seen, self._owed_since = Seen(), None

    def _expire(self) -> None:
        """What the next batch cannot take makes room for what it can."""
        if self._expired_below == self._oldest:
            return
        self._expired_below = self._oldest
        stale = self.pool.expire(self._too_old, but=self._settled)
        running = self.pool.in_flight - self._ending
        old = [i for i, group in self._maker.in_flight.items() if i in running and self._too_old(group)]
        self._end(old)
        if self._cfg.rollout.off_policy:  # else it is the surplus of a step, and nothing is lost by age
            self._seen.stale_groups += len(stale) + len(old)

    def _halt(self) -> None:
        chosen = self.progress.choice is not None
        if not chosen or self._missing or (self.pace.never_halts and self.progress.step + 1 < self._cfg.steps):
            return
        running = self.pool.in_flight - self._ending - self._suspending
        if not self.pace.keeps:
            self._end(running)
        elif running:
            self._suspending |= running
            self._maker.suspend(running)

    def _start(self) -> None:
        if not self._open:
            return
        pool, chosen, size = self.pool, self.progress.choice is not None, self._cfg.rollout.group_size
        room = size * self.pace.to_start(
            self.progress.step,
            chosen,
            usable=pool.usable_count,
            finished=len(pool.finished),
            at_work=responses_at_work(pool.in_flight, self._maker.in_flight, size) / size,
            alive=pool.alive,
        )
        everything = self.pace.never_halts and self._missing > 0
        while (everything or room > 0) and (group := pool.resume()) is not None:
            self._seen.resumed_tokens += tokens_of(group)
            room -= 0 if everything else len(group.unfinished)
            self._work(group.id, group)
        for _ in range(min(math.ceil(room / size), self._budget - self._seen.started)):
            group_id = pool.admit()
            if group_id is None:
                break
            self._seen.started += 1
            self._work(group_id, None)
        if self._owed and self._missing and not self._tasks:
            raise exhausted(self._seen.finished, self._cfg.rollout.max_sample_rounds, self._seen.rates_in_words)

    def _work(self, group_id: int, partial: Group | None) -> None:
        record = self.pool.record_index(group_id)
        task = asyncio.ensure_future(self._maker.make(group_id, record, partial, self._version))
        self._tasks[task] = group_id
        task.add_done_callback(self._over_with)

    def _over_with(self, task: asyncio.Task[Group]) -> None:
        self._done.append(task)
        self._changed.set()

    def _end(self, ids: Collection[int]) -> None:
        """Cancel these; their prompts wait again once that is done."""
        self._ending |= set(ids)
        for task, group_id in self._tasks.items():
            if group_id in ids:
                task.cancel()

    async def _wait(self) -> None:
        """Until something happens. The deadline is of what is owed to the trainer, who sets the pace otherwise."""
        now, timeout = asyncio.get_running_loop().time(), self._cfg.rollout.step_timeout_s
        self._owed_since = None if not self._owed else now if self._owed_since is None else self._owed_since
        try:
            async with asyncio.timeout_at(None if self._owed_since is None else self._owed_since + timeout):
                await self._changed.wait()
        except TimeoutError:
            raise SamplingError(
                f"not enough groups within {timeout:g} s (rollout.step_timeout_s); look at the engines' logs, or "
                "raise it"
            ) from None

    async def _drain(self) -> None:
        """End what is still in flight; its prompts wait again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._done.clear()
        self._ending.clear()
        self._suspending.clear()
        self.pool.give_back(list(self.pool.in_flight))

    # ---- what holds now

    @property
    def _published(self) -> bool:
        return self._version == self.progress.step

    @property
    def _open(self) -> bool:
        """Whether groups may be started."""
        return self._published or (self.pace.never_halts and self._version >= 0)

    @property
    def _missing(self) -> int:
        """Groups that are wanted and not finished."""
        progress = self.progress
        return self.pace.missing(progress.step, progress.choice is not None, self.pool.usable_count)

    @property
    def _owed(self) -> bool:
        """Whether the trainer waits for groups, or will before it can give the engines new weights."""
        if self.progress.choice is None:
            return self._published
        return not self.pace.never_halts and self._missing > 0

    @property
    def _settled(self) -> Collection[int]:
        choice = self.progress.choice
        return () if choice is None else {*choice.batch, *choice.filtered}

    @property
    def _oldest(self) -> int:
        """The oldest version of a token in the next batch that is chosen."""
        return self.progress.step + (self.progress.choice is not None) - self._cfg.rollout.max_staleness

    @property
    def _budget(self) -> int:
        """Prompts that may be started for one batch."""
        return (self._cfg.rollout.max_sample_rounds - 1) * self.pace.round + self.pace.capacity

    def _too_old(self, group: Group) -> bool:
        """Whether the next batch cannot take the group; masking takes it as long as a token is left."""
        policy = self._cfg.rollout.stale_policy
        if policy == "mask_stale_tokens":
            return not group.unfinished and max(s.version_last for s in group.samples) < self._oldest
        return policy == "drop" and group.version_first < self._oldest

    def _measure(self, choice: Choice, groups: list[Group], ages: Ages, masked: int) -> dict[str, float]:
        pace, rollout = self.pace, self._cfg.rollout
        mask = rollout.dynamic_sampling == "mask"
        found = choice_metrics(choice, groups, mask, pace.round, self.pool.cursor.size)
        if not rollout.off_policy:
            return found
        looked_at = {*choice.batch, *choice.filtered}
        waiting = [g for g in self.pool.finished.values() if g.id not in looked_at]
        others = [*waiting, *self.pool.partials.values(), *self._at_work()]
        step = self.progress.step
        return found | staleness_of_batch(ages, others, self._seen, choice, step, rollout.max_staleness, masked)

    def _at_work(self) -> list[Group]:
        """Groups in flight that have a token."""
        running = self.pool.in_flight - self._ending
        return [group for i, group in self._maker.in_flight.items() if i in running and tokens_of(group)]

    # ---- what the trainer says

    def publish(self, version: int) -> None:
        """The engines hold these weights now, and their step may be sampled.

        Raises StepConflict for a version that does not fit the step.
        """
        if version != self.progress.step:
            raise StepConflict(
                f"weights version {version} was published, but the controller is at step {self.progress.step}, which "
                f"needs version {self.progress.step}; a resumed run must restore the controller's state first"
            )
        self._version = version
        if self.progress.status == "waiting":
            self.progress.status = "generating"
        self._changed.set()

    def update_status(self, version: int) -> tuple[Status, str]:
        """Whether the engines may be updated to weights `version` now: ready or waiting, with what it waits for.

        Raises StepConflict unless the batch that these weights are made of is there.
        """
        progress = self.progress
        if progress.status in ("failed", "stopped"):
            return progress.status, progress.message
        self.ready(version - 1)
        if self.pace.never_halts:
            return "ready", ""
        groups = [self._maker.in_flight.get(i) for i in self._tasks.values()]
        running = sum(group is None or not group.finished for group in groups)  # others are only judged
        if not running and not self._missing:
            return "ready", ""
        return "waiting", f"{running} groups at the engines, {self._missing} missing in the next batch"

    def retire(self, step: int) -> list[Group]:
        """Step `step` was trained on: frees its slots. Returns its groups, chosen and filtered, by id.

        Raises StepConflict when that step is not ready.
        """
        choice = self.ready(step)
        groups = [self.pool.finished[i] for i in sorted([*choice.batch, *choice.filtered])]
        self.pool.retire(choice.batch, choice.filtered)
        self.progress = StepProgress(step + 1, self._seen)
        self._changed.set()
        return groups

    def ready(self, step: int) -> Choice:
        """The batch of `step`. Raises StepConflict while there is none."""
        if step != self.progress.step or self.progress.choice is None:
            raise StepConflict(
                f"step {step} is not ready: the controller is at step {self.progress.step} ({self.progress.status})"
                + (f": {self.progress.message}" if self.progress.message else "")
            )
        return self.progress.choice

    def batch(self, step: int) -> list[Group]:
        """Groups of the batch, ascending by id. Raises StepConflict while there is none."""
        return [self.pool.finished[i] for i in self.ready(step).batch]

    def stop(self) -> None:
        """No further step will come."""
        if self.progress.status != "failed":
            self.progress.status = "stopped"

    def state_dict(self) -> tuple[dict[str, Any], list[Group]]:
        """JSON-able position and books, and the groups that are kept: finished, suspended, and what is at work."""
        books, groups = self.pool.state_dict(self._at_work() if self.pace.keeps else ())
        return {"step": self.progress.step, "pool": books}, groups

    def load_state_dict(self, state: dict[str, Any], groups: list[Group]) -> None:
        """Go on from a saved state. Raises StepConflict once sampling has begun, DataError for other prompts.

        Groups of another `rollout.group_size`, and responses that were begun at another `rollout.temperature`, are
        generated anew: a batch has one size of groups, and a response one temperature.
        """
        if self.progress.status != "waiting" or self.progress.step or self._version >= 0:
            raise StepConflict(
                f"the controller is at step {self.progress.step} ({self.progress.status}): a state can be restored "
                "only into one that has just started"
            )
        self.pool.load_state_dict(state["pool"], groups)
        keeps = self.pace.keeps
        self.pool.give_back([g.id for g in groups if self._unfit(g) or (g.id in self.pool.partials and not keeps)])
        self.progress = StepProgress(state["step"], self._seen)
        self._changed.set()

    def _unfit(self, group: Group) -> bool:
        """Whether the configuration that it was started with differs in what cannot be mixed."""
        rollout = self._cfg.rollout
        begun = bool(group.unfinished) and any(s.temperature != rollout.temperature for s in group.samples)
        return begun or len(group.samples) != rollout.group_size

    def counts(self) -> dict[str, int]:
        """Progress of the present step, cheap."""
        pool, progress, usable = self.pool, self.progress, self.pool.usable_count
        return {
            "groups_done": min(usable, self.pace.needed),
            "groups_needed": self.pace.needed,
            "rounds": math.ceil(progress.seen.started / self.pace.round),
            "groups_dropped": len(pool.finished) - usable,
            "groups_in_flight": len(pool.in_flight),
            "groups_suspended": len(pool.partials),
            "groups_started": progress.seen.started,
        }
