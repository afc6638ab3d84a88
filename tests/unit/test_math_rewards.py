"""The verifier `math`: what is read from a response, and verdicts of math-verify that users rely on."""

import pytest

from megatron_rl.data import PromptRecord
from megatron_rl.rewards.boxed_math import MAX_LENGTH, last_boxed, math


def score(response, answer):
    return math(response, PromptRecord("p", ({"role": "user", "content": "x"},), answer=answer))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so \\boxed{4}.", "4"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} or \\boxed{2}", "2"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\left\\{ x \\right.}", "\\left\\{ x \\right."),
        ("\\boxed{a\\}", None),
        ("\\boxed{}", ""),
        ("\\boxed 4", None),
        ("4", None),
        ("", None),
    ],
)
def test_the_last_complete_box_is_the_answer(text, expected):
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("thus \\boxed{4}", "4", 1.0),
        ("\\boxed{2+2}", "4", 1.0),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("\\boxed{\\dfrac12}", "\\frac{1}{2}", 1.0),
        ("\\boxed{0.5}", "$\\frac{1}{2}$", 1.0),
        ("\\boxed{x+1}", "1+x", 1.0),
        ("\\boxed{4}", "\\boxed{4}", 1.0),
        ("\\boxed{1{,}000}", "1000", 1.0),
        ("\\boxed{\\text{Monday}}", "\\text{Monday}", 1.0),
        ("\\boxed{3}", "4", 0.0),
        ("4", "4", 0.0),
        ("\\boxed{4} no, \\boxed{5}", "4", 0.0),
        ("\\boxed{3} and \\boxed{4}", "4", 1.0),
        ("\\boxed{}", "4", 0.0),
        ("\\boxed{" + "1+" * MAX_LENGTH + "1}", "4", 0.0),
        ("\\boxed{__import__('os').system('id')}", "4", 0.0),
    ],
    ids=lambda value: str(value)[:30],
)
def test_verdicts(response, answer, expected):
    assert score(response, answer) == expected


def test_an_answer_that_cannot_be_read_is_an_error_of_the_data():
    with pytest.raises(ValueError, match=r"record 'p': answer .* cannot be read as mathematics"):
        score("\\boxed{4}", " }{ ")
    with pytest.raises(ValueError, match='has no "answer"'):
        score("\\boxed{4}", None)
