"""Environments in processes that can be killed: one `Episode` for each sample; what is said in it is `turns.py`.

    episode.step(text) -> its process's lock -> one frame there -> one frame back       (rollout.environment_timeout_s)
                                       |  late: the process is killed, this sample's environment has failed
                                       |  dead: a new process tries the call once more

A process holds the environments of many samples and serves one call at a time. When it is lost, each of the others goes
on in a new one, where its turns so far are repeated first; an environment that then answers otherwise has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.data import PromptRecord
from megatron_rl.rewards.pool_worker import PoolWorker, WorkerDied

from .environment import DEFAULT_ROLE, EnvironmentFailed, Step

log = logging.getLogger(__name__)
_LOGGED_FAILURES = 5
"""Failures logged in full; later ones are only counted."""


class EnvironmentPool:
    """The processes of a run's environments. Use `async with`; belongs to one event loop.

    Args:
        rollout: environment, its arguments and deadline, and the number of processes.

    Raises:
        ConfigError: on entering, with the message of a process that cannot load the class.
    """

    def __init__(self, rollout: RolloutConfig) -> None:
        assert rollout.environment is not None
        self._places = [_Place(rollout) for _ in range(rollout.environment_workers)]
        self._numbers = itertools.count()
        self.failures = 0

    async def __aenter__(self) -> EnvironmentPool:
        # All are waited for: a start that is left alone could not be ended.
        started = await asyncio.gather(*(place.start() for place in self._places), return_exceptions=True)
        failures = [outcome for outcome in started if outcome is not None]
        if failures:
            await self.close()
            raise failures[0]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def role(self) -> str:
        """Role of the environment's messages in the chat template."""
        return self._places[0].role

    def episode(self, record: PromptRecord) -> Episode:
        """A conversation about `record` that has not begun, in the process with the fewest."""
        return Episode(next(self._numbers), record, min(self._places, key=lambda place: place.episodes))

    def failed(self, name: str, error: EnvironmentFailed) -> None:
        """Count a failure and log the first ones."""
        self.failures += 1
        if self.failures <= _LOGGED_FAILURES:
            more = "; further failures are only counted" if self.failures == _LOGGED_FAILURES else ""
            log.warning("%s is not judged: its environment failed: %s%s", name, error, more)

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(place.close() for place in self._places))


class Episode:
    """One conversation with an environment. Calls come one after the other; when one fails, none may follow."""

    def __init__(self, number: int, record: PromptRecord, place: _Place) -> None:
        self.number, self.life, self.ended = number, -1, False
        self._reset = {"episode": number, "reset": record}
        self._place = place
        self.said: list[tuple[dict[str, Any], dict[str, Any]]] = []
        place.episodes += 1

    async def reset(self) -> str | None:
        """Begin; what it has to say before the first turn. Raises EnvironmentFailed."""
        opening: str | None = (await self._call(self._reset))["opening"]
        return opening

    async def step(self, text: str) -> Step:
        """The answer to a turn of the model. Raises EnvironmentFailed."""
        return Step(**await self._call({"episode": self.number, "step": text}))

    def end(self) -> None:
        """Forget it, whatever state it is in; calls that nobody waits for any more are not made."""
        self.ended = True
        self._place.episodes -= 1
        self._place.forget(self)

    async def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        """Shielded: a caller may be cancelled, but every answer has to be read by the one who asked."""
        answer = await asyncio.shield(self._place.ask(self, call))
        self.said.append((call, answer))
        return answer


class _Place:
    """One process after the other, in which some of the episodes live."""

    def __init__(self, rollout: RolloutConfig) -> None:
        self._name, self._args = str(rollout.environment), rollout.environment_args
        self._timeout_s = rollout.environment_timeout_s
        self._worker: PoolWorker | None = None
        self._lock = asyncio.Lock()
        self._life = 0
        self._calls: set[asyncio.Task[dict[str, Any]]] = set()
        self.role, self.episodes = DEFAULT_ROLE, 0

    async def start(self) -> None:
        """A new process with the class loaded. Raises ConfigError with its message when that fails."""
        first = {"environment": self._name, "args": self._args}
        what = f"rollout.environment={self._name!r}: its process did not load it"
        self._worker, answer = await PoolWorker.start(f"{__package__}.environment_worker", first, ConfigError, what)
        self.role = answer["role"]
        self._life += 1

    def ask(self, episode: Episode, call: dict[str, Any]) -> asyncio.Task[dict[str, Any]]:
        """One answer, when it is this call's turn; raises EnvironmentFailed."""
        task = asyncio.create_task(self._call(episode, call))
        self._calls.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, in case nobody waits any more

    async def _call(self, episode: Episode, call: dict[str, Any]) -> dict[str, Any]:
        async with self._lock:
            try:
                return await self._try_twice(episode, call)
            finally:
                if episode.ended:  # meanwhile, and the call may have made what was to be forgotten
                    self.forget(episode)

    async def _try_twice(self, episode: Episode, call: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._try(episode, call)
        except WorkerDied as first:  # whoever killed it rarely meant this call
            log.warning("a process of rollout.environment=%r ended (%s); its calls are repeated", self._name, first)
        try:
            return await self._try(episode, call)
        except WorkerDied as error:
            raise EnvironmentFailed(f"its process ended twice during one call: {error}") from None

    async def _try(self, episode: Episode, call: dict[str, Any]) -> dict[str, Any]:
        if episode.ended:
            raise EnvironmentFailed("its conversation had ended before it was this call's turn")
        if self._worker is None:
            try:
                await self.start()
            except ConfigError as error:
                raise EnvironmentFailed(str(error)) from None
        if episode.life != self._life:
            for said, answer in episode.said:
                if await self._exchange(said) != answer:
                    raise EnvironmentFailed("it answered otherwise when its turns were repeated in a new process")
            episode.life = self._life
        return await self._exchange(call)

    async def _exchange(self, call: dict[str, Any]) -> dict[str, Any]:
        assert self._worker is not None
        try:
            self._worker.send(call)
            answer: dict[str, Any] = await self._worker.receive(self._timeout_s)
        except TimeoutError:
            await self._lose()
            what = "reset" if "reset" in call else "step"
            raise EnvironmentFailed(
                f"{what} did not answer within {self._timeout_s:g} s (rollout.environment_timeout_s)"
            ) from None
        except WorkerDied:
            await self._lose()
            raise
        if "error" in answer:
            raise EnvironmentFailed(answer["error"])
        return answer

    def forget(self, episode: Episode) -> None:
        """Whenever the process gets to it; nothing is waited for. It may be told so twice."""
        if self._worker is not None and episode.life == self._life:
            with contextlib.suppress(ConnectionError, RuntimeError):  # it is just ending
                self._worker.send({"forget": episode.number})

    async def close(self) -> None:
        """End the process, and the calls to it."""
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._lose()

    async def _lose(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.kill()
