"""A response in several turns: the engines generate one, the environment answers it, and so on to the end.

    prompt | turn 1 | observation | turn 2 | observation | ... | last turn
             loss 1      loss 0     loss 1      loss 0             loss 1

Tokens in, tokens out: what an engine sampled stays as it is, and what the environment says is put behind it as the chat
template would (`data.TurnFrame`). A response ends when the environment says so, after `rollout.max_turns` turns, or
when `rollout.max_response_tokens`, observations included, leave no room for another turn.

A suspended response is given back between two requests. Its environment is not kept: when the response is gone on with,
after a restart too, the environment begins anew and is told the recorded turns again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.data import PromptRecord, PromptTokenizer, TurnFrame

from .client import Engines, together
from .environment import EnvironmentFailed
from .episodes import EnvironmentPool, Episode
from .protocol import SamplingSettings
from .sample import ENVIRONMENT_FAILED, Group, Sample


class TurnTaker:
    """Plays whole groups; holds nothing of them between two calls.

    Raises:
        DataError: the chat template cannot put messages between turns, see `TurnFrame`.
    """

    def __init__(
        self, engines: Engines, tokenizer: PromptTokenizer, pool: EnvironmentPool, rollout: RolloutConfig
    ) -> None:
        self._engines, self._tokenizer, self._pool, self._rollout = engines, tokenizer, pool, rollout
        self._frame = TurnFrame(tokenizer, pool.role)

    async def opened(self, record: PromptRecord) -> PromptRecord:
        """`record` with what the environment has to say before the first turn as its last message, if anything."""
        episode = self._pool.episode(record)
        try:
            opening = await episode.reset()
        except EnvironmentFailed:
            return record  # each sample will see it fail, and say so
        finally:
            episode.end()
        return self._with(record, opening)

    async def play(
        self,
        groups: Sequence[Group],
        records: Sequence[PromptRecord],
        settings: SamplingSettings,
        suspended: Callable[[int], bool],
    ) -> None:
        """Bring every sample to its end, or to where `suspended` leaves it.

        Args:
            groups: new ones, or some that were suspended; the prompt of each is that of `opened(record)`.
            records: theirs, as in the data set.
            settings: `max_new_tokens` bounds the whole response, observations included.
            suspended: whether nothing more may be asked for the group of this id.

        Raises:
            EngineError: of the engines. What an environment does ends its own sample only (`ENVIRONMENT_FAILED`).
        """
        await together(
            [
                self._play(sample, record, settings, partial(suspended, group.id))
                for group, record in zip(groups, records, strict=True)
                for sample in group.samples
                if sample.environment_reward is None and sample.finish_reason != ENVIRONMENT_FAILED
            ]
        )

    def _with(self, record: PromptRecord, opening: str | None) -> PromptRecord:
        if opening is None:
            return record
        return replace(record, messages=(*record.messages, {"role": self._pool.role, "content": opening}))

    async def _play(
        self, sample: Sample, record: PromptRecord, settings: SamplingSettings, suspended: Callable[[], bool]
    ) -> None:
        episode = self._pool.episode(record)
        try:
            await self._begin(sample, record, episode)
            sample.reopen()  # a turn may have ended when the sample was saved
            talk = _Talk(sample, settings, self._rollout, await self._repeat(sample, episode))
            while not (sample.finished or suspended()):
                if talk.turn_ended:
                    await self._answer_turn(talk, episode)
                elif not await self._sample_turn(talk):
                    break
        except EnvironmentFailed as error:
            self._pool.failed(sample.id, error)
            sample.finish(ENVIRONMENT_FAILED)
        finally:
            episode.end()

    async def _begin(self, sample: Sample, record: PromptRecord, episode: Episode) -> None:
        opening = await episode.reset()
        if opening is None:
            return
        if self._tokenizer.encode(self._with(record, opening)) != sample.prompt_tokens.tolist():
            raise EnvironmentFailed("reset returned another text for the same record; all its samples share one prompt")
        if sample.prompt_length > self._rollout.max_prompt_tokens:
            raise EnvironmentFailed(
                f"the prompt has {sample.prompt_length} tokens with what reset returned; "
                f"rollout.max_prompt_tokens={self._rollout.max_prompt_tokens}"
            )

    async def _repeat(self, sample: Sample, episode: Episode) -> float:
        """Tell a new environment the turns that were answered already; the rewards so far."""
        reward, begin = 0.0, 0
        for start, end in sample.observations:
            turn = sample.response_tokens[begin:start].tolist()
            step = await episode.step(self._tokenizer.decode(turn))
            if step.done or self._frame.tokens(step.observation, turn) != sample.response_tokens[start:end].tolist():
                raise EnvironmentFailed("it answered otherwise when the turns of a suspended response were repeated")
            reward, begin = reward + (step.reward or 0.0), end
        return reward

    async def _sample_turn(self, talk: _Talk) -> bool:
        """One turn of the model; False when it was suspended before its end."""
        sample = talk.sample
        await self._engines.generate([sample], replace(talk.settings, max_new_tokens=talk.limit))
        reason = sample.finish_reason
        if reason is None:
            return False
        sample.reopen()
        if len(talk.turn):
            talk.turn_ended = True
        else:  # the model has nothing more to say
            talk.end(reason)
        return True

    async def _answer_turn(self, talk: _Talk, episode: Episode) -> None:
        sample, turn = talk.sample, talk.turn.tolist()
        step = await episode.step(self._tokenizer.decode(turn))
        talk.reward += step.reward or 0.0
        if step.done:
            return talk.end("stop")
        tokens = self._frame.tokens(step.observation, turn)
        room = talk.settings.max_new_tokens - sample.response_length - len(tokens)
        if room <= 0 or len(sample.turns) >= self._rollout.max_turns:
            return talk.end("length")
        sample.append_observation(tokens)
        talk.turn_ended = False


@asynccontextmanager
async def open_turns(
    engines: Engines, tokenizer: PromptTokenizer, rollout: RolloutConfig
) -> AsyncIterator[TurnTaker | None]:
    """A turn taker with its processes; None where no environment is configured.

    Raises:
        ConfigError, DataError: see `EnvironmentPool` and `TurnTaker`.
    """
    if rollout.environment is None:
        yield None
        return
    async with EnvironmentPool(rollout) as pool:
        yield TurnTaker(engines, tokenizer, pool, rollout)


@dataclass
class _Talk:
    """Where one sample stands."""

    sample: Sample
    settings: SamplingSettings
    rollout: RolloutConfig
    reward: float
    turn_ended: bool = field(init=False)
    """Whether the engines have nothing to add to the present turn."""

    def __post_init__(self) -> None:
        turn = self.turn  # of a sample that was suspended, or saved, it may be whole
        full = self.sample.response_length >= self.limit
        self.turn_ended = len(turn) > 0 and (full or int(turn[-1]) in self.settings.stop_token_ids)

    @property
    def _start(self) -> int:
        return self.sample.observations[-1][1] if self.sample.observations else 0

    @property
    def turn(self) -> np.ndarray:
        """Tokens of the present turn so far, int64."""
        return self.sample.response_tokens[self._start :]

    @property
    def limit(self) -> int:
        """Longest response with this turn as its last."""
        whole, turn = self.settings.max_new_tokens, self.rollout.max_turn_tokens
        return whole if turn is None else min(whole, self._start + turn)

    def end(self, reason: str) -> None:
        """The conversation is over."""
        self.sample.environment_reward = self.reward
        self.sample.finish(reason)


def turn_metrics(samples: Collection[Sample]) -> dict[str, float]:
    """`rollout/...` numbers of samples that talked with an environment."""
    turns = np.array([len(sample.turns) for sample in samples], np.float64)
    observed = np.array([sample.response_length - np.count_nonzero(sample.sampled) for sample in samples], np.float64)
    return {
        "rollout/turns_mean": float(turns.mean()),
        "rollout/turns_max": float(turns.max()),
        "rollout/observation_tokens_mean": float(observed.mean()),
        "rollout/environment_errors": float(sum(s.finish_reason == ENVIRONMENT_FAILED for s in samples)),
    }
