"""The order of prompts: every one once an epoch, the same after a resume, and refused for other data."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data import DataError, PromptCursor

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**40)


@given(sizes, seeds, st.booleans(), st.lists(st.integers(0, 50), max_size=8))
def test_every_prompt_comes_once_an_epoch_whatever_the_requests(size, seed, shuffle, requests):
    cursor = PromptCursor(size, seed, shuffle)
    dealt = [index for count in requests for index in cursor.next(count)]
    assert cursor.drawn == len(dealt)
    for start in range(0, len(dealt), size):
        epoch = dealt[start : start + size]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(size))


@given(sizes, seeds, st.booleans(), st.integers(0, 90), st.integers(0, 60))
def test_a_resumed_cursor_goes_on_as_if_nothing_had_happened(size, seed, shuffle, before, after):
    whole = PromptCursor(size, seed, shuffle, "data")
    whole.next(before)
    resumed = PromptCursor(size, seed, shuffle, "data")
    resumed.load_state_dict(whole.state_dict())
    assert resumed.next(after) == whole.next(after)
    assert resumed.state_dict() == whole.state_dict()


def test_the_index_of_any_draw_can_be_asked_for_without_drawing():
    cursor = PromptCursor(7, seed=3)
    asked = [cursor.index_at(ordinal) for ordinal in (20, 0, 13, 6, 7)]
    dealt = PromptCursor(7, seed=3).next(21)
    assert asked == [dealt[ordinal] for ordinal in (20, 0, 13, 6, 7)]
    assert cursor.drawn == 0


def test_without_shuffling_the_order_is_the_file_s():
    assert PromptCursor(3, seed=5, shuffle=False).next(7) == [0, 1, 2, 0, 1, 2, 0]


def test_epochs_and_seeds_have_orders_of_their_own():
    first, second = (PromptCursor(100, seed=1).next(200)[start : start + 100] for start in (0, 100))
    assert first != second != PromptCursor(100, seed=2).next(100) != first


def test_the_order_of_a_seed_never_changes():
    """A run that is resumed after an upgrade must find the order it began with."""
    assert PromptCursor(8, seed=7).next(16) == [6, 3, 4, 0, 2, 7, 5, 1, 1, 3, 2, 7, 4, 5, 0, 6]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (PromptCursor(9, 0, True, "data"), "size 9 then, 8 now"),
        (PromptCursor(8, 1, True, "data"), "seed 1 then, 0 now"),
        (PromptCursor(8, 0, False, "data"), "shuffle False then, True now"),
        (PromptCursor(8, 0, True, "else"), "fingerprint 'else' then, 'data' now"),
    ],
)
def test_a_position_in_other_data_is_refused_and_changes_nothing(other, expected):
    cursor = PromptCursor(8, 0, True, "data")
    cursor.next(3)
    other.next(5)
    with pytest.raises(DataError) as caught:
        cursor.load_state_dict(other.state_dict())
    assert expected in str(caught.value)
    assert cursor.drawn == 3
