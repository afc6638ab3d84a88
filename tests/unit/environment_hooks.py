"""Environments that the tests of turns name as `rollout.environment`. Holds no tests."""

from __future__ import annotations

import os
import signal
import time
import weakref
from typing import Any, ClassVar

from megatron_rl.data import PromptRecord


class Counts:
    """Answers with how many turns there were and what the last one said; over after `last` turns, if at all."""

    def __init__(self, last: int = 100, opening: str | None = None, reward: float | None = 0.5) -> None:
        self._last, self._opening, self._reward = last, opening, reward
        self._turns = 0

    def reset(self, record: PromptRecord) -> str | None:
        return self._opening and f"{self._opening} {record.id}"

    def step(self, text: str) -> tuple[str, bool, float | None]:
        self._turns += 1
        return f"{self._turns}:{text}", self._turns >= self._last, self._reward


class Counted(Counts):
    """Answers with how many of them there are in its process."""

    alive: ClassVar[weakref.WeakSet[Counted]] = weakref.WeakSet()

    def reset(self, record: PromptRecord) -> str | None:
        self.alive.add(self)
        return super().reset(record)

    def step(self, text: str) -> tuple[str, bool, float | None]:
        return str(len(self.alive)), False, None


class Faulty(Counts):
    """Does what the model says."""

    role = "tool"

    def step(self, text: str) -> Any:
        word, _, rest = text.partition(" ")
        match word:
            case "raise":
                raise ValueError(f"no {rest}")
            case "exit":
                raise SystemExit(3)
            case "hang":
                time.sleep(1000)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "print":
                print("noise on standard output")
            case "pair":
                return "a", True
            case "number":
                return 7, False, None
            case "nan":
                return "", False, float("nan")
            case "long":
                return "x" * 10**6, False, None
            case "surrogate":
                return "\ud800", False, None
            case "pid":
                return str(os.getpid()), False, None
        return super().step(text)


class DiesOnce(Counts):
    """Kills its process the first time that a file does not exist yet."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self._marker = marker

    def step(self, text: str) -> tuple[str, bool, float | None]:
        if text == "die once" and not os.path.exists(self._marker):
            open(self._marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(text)


class Moody(Counts):
    """Answers otherwise in every process."""

    def step(self, text: str) -> tuple[str, bool, float | None]:
        if text == "hang":
            time.sleep(1000)
        return f"{os.getpid()}", False, None


class OpensAnew(Counts):
    """Says something else at every beginning."""

    begun = 0

    def reset(self, record: PromptRecord) -> str | None:
        OpensAnew.begun += 1
        return str(OpensAnew.begun)


class WithoutStep:
    def reset(self, record: PromptRecord) -> None: ...


class WithAsyncStep(WithoutStep):
    async def step(self, text: str) -> None: ...


class WithTwoArguments(WithoutStep):
    def step(self, text: str, more: str) -> None: ...


NOT_A_CLASS = 3
