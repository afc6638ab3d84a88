"""What the scheduler shares with others: what is known of a step, and what it asks of who makes groups. No logic."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from .pool import Choice
from .sample import Group
from .seen import Seen

Status = Literal["waiting", "generating", "ready", "failed", "stopped"]


class StepConflict(RuntimeError):
    """The trainer asked for something that does not fit the step the controller is at."""


@dataclass
class StepProgress:
    """What is known of the step that the trainer is at."""

    step: int
    seen: Seen
    """What was sampled for its batch."""
    status: Status = "waiting"
    message: str = ""
    choice: Choice | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """`rollout/...` numbers of the choice."""


class Maker(Protocol):
    """Generates and judges groups; an error of `make` fails the step."""

    @property
    def in_flight(self) -> Mapping[int, Group]:
        """Groups at work by id, as they are at this moment."""

    async def make(self, group_id: int, record_index: int, partial: Group | None, version: int) -> Group:
        """A new group of weights `version`, or `partial` gone on with: judged, or with unfinished samples if suspended.

        Cancelling it ends its requests at the engines.
        """

    def suspend(self, ids: Collection[int]) -> None:
        """Have these groups stop soon: their `make` returns with what they have."""
