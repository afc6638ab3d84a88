"""From a drawn prompt to a judged group: one request to an engine, then the verifiers. Batches are not decided here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from megatron_rl.config import Config
from megatron_rl.data import PromptDataset, PromptRecord, PromptTokenizer

from .client import EngineClient
from .protocol import EngineError, Prompt, SamplingSettings
from .sample import Group
from .scoring import Verifiers, judge, shape


class Examiner:
    """Asks the engines for answers to a record and has them judged; for training and evaluation alike."""

    def __init__(self, tokenizer: PromptTokenizer, client: EngineClient, verifiers: Verifiers, run_seed: int) -> None:
        self._tokenizer, self._client, self._verifiers, self._run_seed = tokenizer, client, verifiers, run_seed
        self.stop_token_ids = tuple(tokenizer.eos_token_ids)

    def start(
        self, group_id: int, record: PromptRecord, size: int, *, version: int, temperature: float, kind: str = "s"
    ) -> Group:
        """`size` samples without a token yet; `kind` as for `Group.start`."""
        return Group.start(
            group_id,
            record.id,
            np.array(self._tokenizer.encode(record), np.int64),
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
        oldest_version: int | None = None,
    ) -> None:
        """Generate all samples of `groups` with one request, then judge them. Raises EngineError as `fill` does."""
        await fill(groups, self._client, settings, oldest_version)
        pairs = zip(groups, records, strict=True)
        await asyncio.gather(*(judge(group, record, self._tokenizer, self._verifiers) for group, record in pairs))


class GroupMaker:
    """Makes training groups. Holds no state of its own."""

    def __init__(
        self,
        cfg: Config,
        dataset: PromptDataset,
        tokenizer: PromptTokenizer,
        client: EngineClient,
        verifiers: Verifiers,
    ) -> None:
        self._cfg, self._dataset = cfg, dataset
        self._examiner = Examiner(tokenizer, client, verifiers, cfg.seed)
        self._settings = SamplingSettings(
            temperature=cfg.rollout.temperature,
            max_new_tokens=cfg.rollout.max_response_tokens,
            stop_token_ids=self._examiner.stop_token_ids,
            top_p=cfg.rollout.top_p,
            top_k=cfg.rollout.top_k,
            min_p=cfg.rollout.min_p,
        )

    async def make(self, group_id: int, record_index: int, version: int, oldest_version: int) -> Group:
        """Generate, judge and shape one group.

        Raises:
            EngineError: see `EngineClient.generate`; or a token comes from weights older than `oldest_version`.
        """
        record, rollout = self._dataset[record_index], self._cfg.rollout
        group = self._examiner.start(
            group_id, record, rollout.group_size, version=version, temperature=rollout.temperature
        )
        await self._examiner.answer([group], [record], self._settings, oldest_version)
        shape(group, self._cfg)
        return group


async def fill(
    groups: Sequence[Group], client: EngineClient, settings: SamplingSettings, oldest_version: int | None = None
) -> None:
    """Generate all samples of `groups` with one request. Raises EngineError, also for weights that are too old."""
    samples = [s for g in groups for s in g.samples]
    answers = await client.generate([Prompt(s.id, s.prompt_tokens, s.seed) for s in samples], settings)
    for sample, answer in zip(samples, answers, strict=True):
        sample.append(answer.tokens, answer.log_probs, answer.spans)
        sample.finish(answer.finish_reason)
        if oldest_version is not None and answer.spans and sample.version_first < oldest_version:
            raise EngineError(
                f"engine {answer.engine}: {sample.id} was sampled by weight version {sample.version_first}, but this "
                f"step needs {oldest_version} or newer; did the weight update reach this engine (engine.urls)?"
            )
