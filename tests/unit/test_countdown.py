"""Countdown: which expressions count, which formats earn what, and that nothing hostile is run or takes long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data import PromptRecord
from megatron_rl.rewards.countdown import MAX_DEPTH, MAX_LENGTH, countdown, countdown_format


def puzzle(numbers=(3, 5, 7), target="22", **fields):
    fields.setdefault("extra", {"numbers": list(numbers)})
    return PromptRecord("p-1", ({"role": "user", "content": "x"},), answer=target, **fields)


def score(expression, **kwargs):
    return countdown(f"<think>so</think><answer>{expression}</answer>", puzzle(**kwargs))


@pytest.mark.parametrize("expression", ["3*5+7", "7 + 5*3", "(3*5)+7", "((7))+((5)*3)", " 7+3*5 ", "7+(3*5)"])
def test_right_expressions(expression):
    assert score(expression) == 1.0


@pytest.mark.parametrize(
    ("expression", "numbers", "target"),
    [("1/3*3", (1, 3, 3), "1"), ("8/(3-8/3)", (3, 3, 8, 8), "24"), ("3-5", (3, 5), "-2"), ("5", (5,), "5")],
)
def test_arithmetic_is_exact(expression, numbers, target):
    assert score(expression, numbers=numbers, target=target) == 1.0


@pytest.mark.parametrize(
    "expression",
    [
        "3*5+7+0",  # a number that was not given
        "5+7",  # one left out
        "3*5+7*3/3",  # one used twice
        "3+5+7",  # another value
        "22",  # the target itself
        "35-7-6",
        "3*5+7=22",
        "-3*-5+7",  # signs are no operation between two numbers
        "+3*5+7",
        "3*5+07",
        "3.0*5+7",
        "3*5+7.",
        "3*5+7,",
        "3x5+7",
        "3 * 5 plus 7",
        "(3*5+7",
        "3*5+7)",
        "3**5+7",
        "3//5+7",
        "3%5+7",
        "3^5+7",
        "",
        " ",
        "()",
        "3*5\n+7\n",
    ],
)
def test_wrong_or_unallowed_expressions(expression):
    assert score(expression) == 0.0


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('touch /tmp/owned')",
        "9**9**9**9",
        "9**9**9*0+22",
        "3*5+7 if 1 else 0",
        "(lambda: 22)()",
        "[3*5+7][0]",
        "3*5+7#",
        "3*5+7;1",
        "٣*٥+٧",  # digits of another script
        "３*５+７",
        "3×5+7",
        "3\u00a0*5+7",
        "3*5+7\x00",
        "True*3*5+7",
        "1_0+12",
        "0x16",
        "22j",
        "1e1",
        "(" * 5000 + "22" + ")" * 5000,
        "(" * (MAX_DEPTH + 1) + "3" + ")" * (MAX_DEPTH + 1) + "*5+7",
        "-" * 100 + "22",
        "3*5+7" + " " * MAX_LENGTH + "+0",
        "9" * 200,
        "1+" * 100 + "1",
        "9" * 1_000_000,
        "3*5+7/0*0",
        "3/(5-5)*7",
    ],
    ids=lambda text: text[:24],
)
def test_hostile_expressions_are_simply_wrong(expression):
    assert score(expression) == 0.0
    assert score(expression, numbers=(3, 5, 5, 7)) == 0.0


@given(st.text(alphabet="0123456789+-*/() \n<>answerthik\\{}é٣", max_size=60))
def test_no_text_raises(text):
    for response in (text, f"<answer>{text}</answer>", f"<think>{text}</think><answer>3*5+7</answer>"):
        assert countdown(response, puzzle()) in (0.0, 1.0)
        assert countdown_format(response, puzzle()) in (0.0, 0.1, 0.5, 0.6, 1.0)


def test_the_last_answer_counts():
    assert countdown("<answer>1</answer><answer>3*5+7</answer>", puzzle()) == 1.0
    assert countdown("<answer>3*5+7</answer><answer>1</answer>", puzzle()) == 0.0
    assert countdown("<answer><answer>3*5+7</answer>", puzzle()) == 1.0
    for incomplete in ("3*5+7", "<answer>3*5+7", "3*5+7</answer>", "</answer>3*5+7<answer>", ""):
        assert countdown(incomplete, puzzle()) == 0.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<think>a\nb</think>\n<answer>b</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>a</think><answer>b</answer> done", 0.6),
        ("so <think>a</think><answer>b</answer>", 0.6),
        ("<think>a</think> then <answer>b</answer>", 0.6),
        ("<answer>b</answer><think>a</think>", 0.6),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.6),
        ("<think>a</think><answer>b</answer><answer>b</answer>", 0.6),
        ("<think><answer>b</answer></think>", 0.6),
        ("<answer>b</answer>", 0.5),
        ("a</think><answer>b</answer>", 0.5),
        ("<think>a</think>b", 0.1),
        ("<think>a</think><answer>b", 0.1),
        ("</think><think></answer><answer>", 0.0),
        ("<Think>a</Think>", 0.0),
        ("", 0.0),
    ],
)
def test_format(response, expected):
    assert countdown_format(response, puzzle()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (puzzle(extra={}), '"extra": {"numbers"'),
        (puzzle(extra={"numbers": ["3"]}), '"extra": {"numbers"'),
        (puzzle(extra={"numbers": [True]}), '"extra": {"numbers"'),
        (puzzle(target=None), 'no "answer"|whole number'),
        (puzzle(target="22.5"), "whole number"),
    ],
)
def test_a_record_without_a_puzzle_is_an_error_of_the_data(record, expected):
    with pytest.raises(ValueError, match=expected):
        countdown("<answer>3</answer>", record)
