"""A calculator for the model, an example of an environment: `<calc>3 * (5 + 7)</calc>` is answered with its value.

rollout:
  environment: megatron_rl.environments.calculator:Calculator
"""

from __future__ import annotations

import re

from megatron_rl.data.records import PromptRecord
from megatron_rl.rewards.countdown import value_of

CALC = re.compile(r"<calc>([^<]*)</calc>\s*\Z")
HINT = "Write <calc>an expression</calc> to have it worked out, or <answer>your answer</answer> to end."


class Calculator:
    """Answers a turn that ends with an expression; a turn with an answer ends the conversation.

    Args:
        hint: answer a turn that has neither with a hint; otherwise such a turn ends the conversation.
        penalty: taken from the reward for each expression that has no value.
    """

    role = "user"

    def __init__(self, hint: bool = True, penalty: float = 0.0) -> None:
        self._hint, self._penalty = hint, penalty

    def reset(self, record: PromptRecord) -> str | None:
        """There is nothing to say before the first turn."""
        return None

    def step(self, text: str) -> tuple[str, bool, float | None]:
        """The value of the expression at the end of `text`; whole numbers and fractions are exact."""
        if "</answer>" in text:
            return "", True, None
        found = CALC.search(text)
        if found is None:
            return (HINT, False, None) if self._hint else ("", True, None)
        value = value_of(found[1])
        if value is None:
            return "That has no value: use whole numbers, + - * / and round brackets.", False, -self._penalty
        return str(value), False, None
