"""The calculator answers expressions, exactly, and nothing hostile is run or takes long."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data import PromptRecord
from megatron_rl.environments.calculator import HINT, Calculator
from megatron_rl.rewards.countdown import MAX_LENGTH, value_of
from megatron_rl.rollout.environment import load_environment, read_step, role_of

NAME = "megatron_rl.environments.calculator:Calculator"


def step(text: str, **args: bool | float) -> tuple[str, bool, float | None]:
    calculator = Calculator(**args)
    assert calculator.reset(PromptRecord("r", ({"role": "user", "content": "?"},))) is None
    found = read_step(calculator.step(text))
    return found.observation, found.done, found.reward


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("I try <calc>3 * (5 + 7)</calc>", "36"),
        ("<calc>7/2</calc>\n", "7/2"),
        ("<calc>1+1</calc> no, <calc>2+2</calc>", "4"),
        ("<calc>1/3*3</calc>", "1"),
    ],
)
def test_the_expression_at_the_end_of_a_turn_is_worked_out(text: str, answer: str):
    assert step(text) == (answer, False, None)


@pytest.mark.parametrize(
    "expression",
    ["1/0", "2**9", "__import__('os')", "a", "", "9" * (MAX_LENGTH + 1), "(" * 200 + ")" * 200, "1 2", "²"],
)
def test_what_is_no_arithmetic_has_no_value_and_may_cost_something(expression: str):
    observation, done, reward = step(f"<calc>{expression}</calc>", penalty=0.25)
    assert "has no value" in observation
    assert (done, reward) == (False, -0.25)


def test_an_answer_ends_the_conversation_and_anything_else_gets_a_hint():
    assert step("<calc>1+1</calc><answer>2</answer>") == ("", True, None)
    assert step("so <calc>1+1</calc> it is") == (HINT, False, None)
    assert step("hm", hint=False) == ("", True, None)


@given(
    st.recursive(st.integers(0, 99).map(str), lambda e: st.builds("({} {} {})".format, e, st.sampled_from("+-*"), e))
)
def test_values_are_those_of_python(expression: str):
    if len(expression) <= MAX_LENGTH:
        assert value_of(expression) == Fraction(eval(expression))


def test_it_is_an_environment():
    assert role_of(load_environment(NAME, {"hint": False, "penalty": 0.1})) == "user"
