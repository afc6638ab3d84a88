"""From a drawn prompt to a judged group: the engines generate, then the verifiers. Batches are not decided here."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from megatron_rl.config import Config
from megatron_rl.data import PromptDataset, PromptRecord, PromptTokenizer
from megatron_rl.rewards import RewardPool

from .client import Engines
from .protocol import SamplingSettings
from .sample import Group, group_name
from .scoring import judge, shape
from .turns import TurnTaker


class Examiner:
    """Asks the engines for answers to a record and has them judged; for training and evaluation alike.

    With `turns`, an answer is a conversation with an environment.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        engines: Engines,
        verifiers: RewardPool,
        run_seed: int,
        turns: TurnTaker | None = None,
    ) -> None:
        self.tokenizer, self._engines, self._verifiers, self._run_seed = tokenizer, engines, verifiers, run_seed
        self._turns = turns
        self.stop_token_ids = tuple(tokenizer.eos_token_ids)

    async def start(
        self, group_id: int, record: PromptRecord, size: int, *, version: int, temperature: float, kind: str = "s"
    ) -> Group:
        """`size` samples without a token yet; `kind` as for `Group.start`."""
        if self._turns is not None:
            record = await self._turns.opened(record)
        return Group.start(
            group_id,
            record.id,
            np.array(self.tokenizer.encode(record), np.int64),
            size,
            run_seed=self._run_seed,
            version=version,
            temperature=temperature,
            kind=kind,
        )

    async def answer(
        self,
        groups: Sequence[Group],
        records: Sequence[PromptRecord],
        settings: SamplingSettings,
        suspended: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Generate what the samples of `groups` lack, then judge the groups that are finished.

        `suspended` says of a group's id whether another request may be sent for it. Raises EngineError; a group that
        was suspended is left unfinished.
        """
        if self._turns is None:
            await self._engines.generate([s for g in groups for s in g.samples], settings)
        else:
            await self._turns.play(groups, records, settings, suspended)
        pairs = [pair for pair in zip(groups, records, strict=True) if not pair[0].unfinished]
        await asyncio.gather(*(judge(group, record, self.tokenizer, self._verifiers) for group, record in pairs))


class GroupMaker:
    """Makes training groups, from their beginning or from where they were suspended."""

    def __init__(self, cfg: Config, dataset: PromptDataset, examiner: Examiner, engines: Engines) -> None:
        self._cfg, self._dataset, self._examiner, self._engines = cfg, dataset, examiner, engines
        self._suspended: set[int] = set()
        self._run = secrets.token_hex(4) if cfg.engine.routed_experts else ""
        self._made = itertools.count()
        self.packs: dict[int, str] = {}
        """Of groups that are being made, by id: the pack into which routes of experts go now."""
        self.in_flight: dict[int, Group] = {}
        """Groups that are being made, by id. Their samples grow by whole segments."""
        self._settings = SamplingSettings(
            temperature=cfg.rollout.temperature,
            max_new_tokens=cfg.rollout.max_response_tokens,
            stop_token_ids=examiner.stop_token_ids,
            top_p=cfg.rollout.top_p,
            top_k=cfg.rollout.top_k,
            min_p=cfg.rollout.min_p,
        )

    async def make(self, group_id: int, record_index: int, partial: Group | None, version: int) -> Group:
        """See `progress.Maker`; what is judged is shaped as well. Raises EngineError."""
        record, rollout = self._dataset[record_index], self._cfg.rollout
        group = partial or await self._examiner.start(
            group_id, record, rollout.group_size, version=version, temperature=rollout.temperature
        )
        self.in_flight[group_id] = group
        try:
            if not (group.unfinished and self.suspended(group_id)):
                await self._examiner.answer([group], [record], self._settings_of(group_id), self.suspended)
            if not group.unfinished:
                shape(group, self._cfg)
            return group
        finally:
            del self.in_flight[group_id]
            self.packs.pop(group_id, None)
            self._suspended.discard(group_id)

    def _settings_of(self, group_id: int) -> SamplingSettings:
        """With a pack that no other attempt at this group has, if routes are wanted: nobody else's rows are in it."""
        if not self._run:
            return self._settings
        self.packs[group_id] = f"{group_name(group_id)}{self._run}-{next(self._made)}"
        return replace(self._settings, routes=self.packs[group_id])

    def suspend(self, ids: Collection[int]) -> None:
        """See `progress.Maker`; also for a group whose `make` has not begun yet."""
        self._suspended.update(ids)
        self._engines.suspend([group_name(group_id) for group_id in ids])

    def suspended(self, group_id: int) -> bool:
        """Whether it was told to come back; whoever asks the engines several times for one group looks here first."""
        return group_id in self._suspended
