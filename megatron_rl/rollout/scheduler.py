"""Which groups run when, and which become the batch of a step. No HTTP, no engine and no verifier is known here.

One loop of four verbs: begin (weights are published), collect (admit, finish, choose), drain (end what is not needed),
retire (the batch was trained on). `controller.py` draws it among the other loops.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_rl.config import Config

from .pool import Choice, GroupPool, choose, groups_to_start
from .sample import Group

log = logging.getLogger(__name__)
Status = Literal["waiting", "generating", "ready", "failed", "stopped"]
MakeGroup = Callable[[int, int, int, int], Awaitable[Group]]
"""(group id, index of its record, weight version, oldest version allowed) -> the judged group."""


class SamplingError(RuntimeError):
    """A step's batch cannot be made. The message says why and what to do."""


class StepConflict(RuntimeError):
    """The trainer asked for something that does not fit the step the controller is at."""


@dataclass
class StepProgress:
    """What is known of the step being sampled."""

    step: int
    status: Status = "waiting"
    message: str = ""
    started: int = 0
    finished: int = 0
    pass_rates: Counter[float] = field(default_factory=Counter)
    choice: Choice | None = None
    began: float = field(default_factory=time.monotonic)


class Scheduler:
    """Samples step after step for the trainer.

    Args:
        cfg: the run.
        pool: prompts and groups.
        make: generates and judges one group.
        max_staleness: published weight versions that a token may be behind when its group is trained on.
    """

    def __init__(self, cfg: Config, pool: GroupPool, make: MakeGroup, max_staleness: int = 0) -> None:
        self._cfg, self.pool, self._make, self._max_staleness = cfg, pool, make, max_staleness
        self._tasks: dict[asyncio.Task[Group], int] = {}
        self._version = -1
        self._changed = asyncio.Event()
        self.progress = StepProgress(step=0)

    # ---- the loop

    async def run(self) -> None:
        """Sample until the last step is trained on, or one fails."""
        while self.progress.step < self._cfg.steps and self.progress.status == "waiting":
            await self._until(self._published)
            await self._sample()
            await self._until(self._settled)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Waits for the trainer, who sets the pace, so without a deadline: it is the trainer's waits that have one."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _published(self) -> bool:
        return self._version >= self.progress.step

    def _settled(self) -> bool:
        """The batch was trained on, or there will be none."""
        return self.progress.status in ("waiting", "failed", "stopped")

    async def _sample(self) -> None:
        progress = self.progress
        progress.status, progress.began = "generating", time.monotonic()
        self.pool.expire(self._oldest_version)
        try:
            async with asyncio.timeout(self._cfg.rollout.step_timeout_s):
                choice = await self._collect()
            self._require_rewards(choice)
            progress.choice = choice
            progress.status = "ready"
            log.info("step %d: ready after %.2f s, %s", progress.step, time.monotonic() - progress.began, self.counts())
        except TimeoutError:
            self._fail(f"{self._where()}: not enough groups within {self._cfg.rollout.step_timeout_s:g} s "
                       "(rollout.step_timeout_s); look at the engines' logs, or raise it")  # fmt: skip
        except Exception as error:
            self._fail(f"{self._where()}: {error}", error)
        finally:
            await self._drain()

    async def _collect(self) -> Choice:
        while (choice := self._choose()) is None:
            self._admit()
            if not self._tasks:
                raise self._exhausted()
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=self._tasks.__getitem__):
                self._finish(task)
        return choice

    def _require_rewards(self, choice: Choice) -> None:
        """A batch without a single reward would be trained on in silence, step after step."""
        samples = [s for i in choice.batch for s in self.pool.finished[i].samples]
        if not any(s.valid for s in samples):
            raise SamplingError(
                f"none of the {len(samples)} samples of the batch has a reward: every call of a verifier failed; the "
                "log of the controller says how; correct the verifier, its component in reward.components, or the data"
            )

    def _choose(self) -> Choice | None:
        usable = {i: self.pool.usable(group) for i, group in self.pool.finished.items()}
        needed = self._cfg.rollout.groups_per_step
        return choose(usable, self.pool.in_flight, needed, in_order=self._cfg.deterministic)

    def _admit(self) -> None:
        rollout, pool = self._cfg.rollout, self.pool
        count = groups_to_start(
            needed=rollout.groups_per_step,
            usable=pool.usable_count,
            finished=len(pool.finished),
            in_flight=len(pool.in_flight),
            capacity=pool.capacity,
            oversample=rollout.oversample,
            refill=rollout.dynamic_sampling == "refill",
        )
        for _ in range(min(count, rollout.max_sample_rounds * pool.capacity - self.progress.started)):
            group_id = pool.admit()
            if group_id is None:
                break
            self.progress.started += 1
            work = self._make(group_id, pool.record_index(group_id), self._version, self._oldest_version)
            self._tasks[asyncio.ensure_future(work)] = group_id

    def _finish(self, task: asyncio.Task[Group]) -> None:
        group = task.result()
        del self._tasks[task]
        self.pool.finish(group)
        self.progress.finished += 1
        rate = group.pass_rate
        self.progress.pass_rates[round(rate, 2) if math.isfinite(rate) else math.nan] += 1  # one NaN: one key

    async def _drain(self) -> None:
        """End what is still in flight; its prompts wait again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self.pool.give_back(list(self.pool.in_flight))

    # ---- what the trainer says

    def publish(self, version: int) -> None:
        """The engines hold these weights now. Raises StepConflict for a version that does not fit the step."""
        if version != self.progress.step:
            raise StepConflict(
                f"weights version {version} was published, but the controller is at step {self.progress.step}, which "
                f"needs version {self.progress.step}; a resumed run must restore the controller's state first"
            )
        self._version = version
        self._changed.set()

    def retire(self, step: int) -> list[Group]:
        """Step `step` was trained on: frees its slots. Returns its groups, chosen and filtered, by id.

        Raises StepConflict when that step is not ready.
        """
        choice = self.ready(step)
        groups = [self.pool.finished[i] for i in sorted([*choice.batch, *choice.filtered])]
        self.pool.retire(choice.batch, choice.filtered)
        self.progress = StepProgress(step=step + 1)
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
        """JSON-able position and books, and the finished groups."""
        books, groups = self.pool.state_dict()
        return {"step": self.progress.step, "pool": books}, groups

    def load_state_dict(self, state: dict[str, Any], groups: list[Group]) -> None:
        """Go on from a saved state. Raises StepConflict once sampling has begun, DataError for other prompts."""
        if self.progress.status != "waiting" or self.progress.step or self._version >= 0:
            raise StepConflict(
                f"the controller is at step {self.progress.step} ({self.progress.status}): a state can be restored "
                "only into one that has just started"
            )
        self.pool.load_state_dict(state["pool"], groups)
        self.progress = StepProgress(step=state["step"])
        self._changed.set()

    # ---- what is told about it

    def counts(self) -> dict[str, int]:
        """Progress of the present step, cheap."""
        pool, progress = self.pool, self.progress
        usable = pool.usable_count
        return {
            "groups_done": min(usable, self._cfg.rollout.groups_per_step),
            "groups_needed": self._cfg.rollout.groups_per_step,
            "rounds": math.ceil(progress.started / pool.capacity),
            "groups_dropped": len(pool.finished) - usable,
            "groups_in_flight": len(pool.in_flight),
            "groups_started": progress.started,
        }

    def metrics(self) -> dict[str, float]:
        """`rollout/...` numbers of a ready step. Groups given back do not count, so timing does not show in them."""
        choice = self.ready(self.progress.step)
        chosen = [self.pool.finished[i] for i in choice.batch]
        mask = self._cfg.rollout.dynamic_sampling == "mask"
        dropped = len(choice.filtered) + (sum(not g.informative for g in chosen) if mask else 0)
        looked_at = [*choice.batch, *choice.filtered]
        return {
            "rollout/groups_generated": float(len(looked_at)),
            "rollout/groups_dropped_fraction": dropped / len(looked_at),
            "rollout/sample_rounds": float(math.ceil(len(looked_at) / self.pool.capacity)),
            "rollout/epoch": float(max(looked_at) // self.pool.cursor.size),
        }

    @property
    def _oldest_version(self) -> int:
        return max(0, self.progress.step - self._max_staleness)

    def _where(self) -> str:
        counts = self.counts()
        return f"step {self.progress.step}: {counts['groups_done']} of {counts['groups_needed']} groups"

    def _exhausted(self) -> SamplingError:
        rollout, rates = self._cfg.rollout, self.progress.pass_rates
        seen = ", ".join(
            f"{rate:g}: {count}" for rate, count in sorted(rates.items(), key=lambda r: (math.isnan(r[0]), r[0]))
        )
        if any(map(math.isnan, rates)):
            seen += " (nan: a verifier failed; the controller's log says how)"
        return SamplingError(
            f"all {self.progress.finished} groups of rollout.max_sample_rounds={rollout.max_sample_rounds} rounds are "
            f"used up; mean correctness seen (value: groups): {seen}; use prompts of fitting difficulty, a larger "
            "rollout.group_size or max_sample_rounds, or rollout.dynamic_sampling=mask"
        )

    def _fail(self, message: str, error: Exception | None = None) -> None:
        log.error("%s", message, exc_info=error)
        self.progress.status, self.progress.message = "failed", message
