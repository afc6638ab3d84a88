"""Digit sorting, and exact match."""

import pytest

from megatron_rl.data import PromptRecord
from megatron_rl.rewards.exact import exact, sorting, sorting_format


def record(answer):
    return PromptRecord("p", ({"role": "user", "content": "3142"},), answer=answer)


@pytest.mark.parametrize(
    ("response", "correct", "valid"),
    [
        ("1234", 1.0, 1.0),
        ("4321", 0.0, 1.0),
        ("9999", 0.0, 1.0),
        ("123", 0.0, 0.0),
        ("12344", 0.0, 0.0),
        ("1234 ", 0.0, 0.0),
        (" 1234", 0.0, 0.0),
        ("12 34", 0.0, 0.0),
        ("1234\n", 0.0, 0.0),
        ("12a4", 0.0, 0.0),
        ("١٢٣٤", 0.0, 0.0),
        ("12²4", 0.0, 0.0),
        ("1<pad>234", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_sorting_is_strict(response, correct, valid):
    assert sorting(response, record("1234")) == correct
    assert sorting_format(response, record("1234")) == valid


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [(" Paris\n", "Paris", 1.0), ("Paris", " Paris", 1.0), ("paris", "Paris", 0.0), ("Paris.", "Paris", 0.0)],
)
def test_exact_ignores_surrounding_space_only(response, answer, expected):
    assert exact(response, record(answer)) == expected


@pytest.mark.parametrize("verifier", [sorting, sorting_format, exact])
def test_a_record_without_answer_is_an_error_of_the_data(verifier):
    with pytest.raises(ValueError, match="'p' has no \"answer\""):
        verifier("1234", record(None))
