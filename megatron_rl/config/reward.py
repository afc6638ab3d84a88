"""Section `reward:`, the verifiers that score a response and how their scores add up."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from .base import Score, Seconds, Section


class RewardComponent(Section):
    """One verifier of the total reward."""

    name: str
    """A registered verifier (countdown, sorting, math, exact, ..._format) or `module:function`."""
    weight: Score = 1.0
    """Factor in the total."""
    range: tuple[Score, Score] | None = None
    """The component's own bounds, mapped to 0 .. 1 before weighting."""
    correctness: bool = False
    """This component's raw value decides which groups are informative, and is reported as pass@1."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the verifier."""

    @model_validator(mode="after")
    def _range(self) -> RewardComponent:
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError(
                f"range={list(self.range)} of component {self.name!r}: the first bound must be the smaller"
            )
        return self


class RewardConfig(Section):
    """Total = sum of weight * component."""

    components: list[RewardComponent] = Field(min_length=1)
    """At least one."""
    workers: int = Field(0, ge=0, le=10_000)
    """Verifier processes; 0 = in the controller, for verifiers that cannot hang."""
    timeout_s: Seconds = 10.0
    """Deadline of one verification; a worker past it is killed and the sample masked."""
    on_error: Literal["mask", "fail"] = "mask"
    """A verifier that raises, hangs or returns NaN: mask that sample (counted), or end the run."""
    shuffle: bool = False
    """Permute rewards within each group: a control that must not learn."""

    @model_validator(mode="after")
    def _one_correctness(self) -> RewardConfig:
        names = [c.name for c in self.components]
        if len(set(names)) != len(names):
            raise ValueError(f"components {names}: every name may stand once; merge the doubled one")
        marked = [c.name for c in self.components if c.correctness]
        if len(marked) > 1:
            raise ValueError(f"correctness is true for {marked}; mark one component at most")
        return self
