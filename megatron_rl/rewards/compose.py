"""From the values of components to one reward: ranges, weights, correctness. Pure; running verifiers is `evaluate.py`.

total = sum_k weight_k * component_k,  component_k mapped from its range to [0, 1] where it states one
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .evaluate import Outcome

if TYPE_CHECKING:
    from megatron_rl.config.reward import RewardComponent

_TOLERANCE = 1e-6
"""Of the width of a range: rounding may carry a value this far outside."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """What one response earned.

    `total` is the weighted sum; `correctness` the raw value of the component flagged so, else the total; `components`
    the raw value by name. NaN stands where a verifier failed (`errors` says why, by name), and in a total that needs
    it: such a sample is not trained on.
    """

    total: float
    correctness: float
    components: dict[str, float]
    errors: dict[str, str] = field(default_factory=dict)


def combine(outcome: Outcome, components: Sequence[RewardComponent]) -> RewardResult:
    """The reward of a response from its components' values, in the order of the configuration."""
    errors = {components[index].name: reason for index, reason in outcome.errors.items()}
    total = 0.0
    correctness: float | None = None
    for component, value in zip(components, outcome.values, strict=True):
        scaled = _scaled(component, value, errors)
        if component.weight:  # a component of weight 0 is only watched: its failure costs nothing
            total += component.weight * scaled
        if component.correctness:
            correctness = value
    values = {component.name: value for component, value in zip(components, outcome.values, strict=True)}
    return RewardResult(total, total if correctness is None else correctness, values, errors)


def _scaled(component: RewardComponent, value: float, errors: dict[str, str]) -> float:
    if component.range is None or math.isnan(value):
        return value
    low, high = component.range
    scaled = (value - low) / (high - low)
    if not -_TOLERANCE <= scaled <= 1 + _TOLERANCE:
        # Clipping would hide that range and verifier disagree.
        errors[component.name] = f"returned {value:g}, outside its range {low:g} .. {high:g}"
        return math.nan
    return min(max(scaled, 0.0), 1.0)
