"""The invariants listed on top of policy/microbatch.py, for any lengths."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.policy.microbatch import plan_microbatches

LENGTHS = st.lists(st.integers(1, 40), max_size=60)
DP = st.integers(1, 5)
CAP = st.integers(40, 120)
MULTIPLE = st.integers(1, 4)


@given(LENGTHS, DP, CAP, MULTIPLE)
def test_every_sequence_occurs_exactly_once(lengths, dp_size, cap, multiple):
    plan = plan_microbatches(lengths, dp_size, cap, multiple)
    seen = [i for rank in plan.microbatches for microbatch in rank for i in microbatch]
    assert sorted(seen) == list(range(len(lengths)))


@given(LENGTHS, DP, CAP, MULTIPLE)
def test_all_ranks_have_the_same_rounded_count(lengths, dp_size, cap, multiple):
    plan = plan_microbatches(lengths, dp_size, cap, multiple)
    assert len(plan.microbatches) == dp_size
    assert {len(rank) for rank in plan.microbatches} == {plan.num_microbatches}
    assert plan.num_microbatches >= multiple
    assert plan.num_microbatches % multiple == 0


@given(LENGTHS, DP, CAP, MULTIPLE)
def test_no_microbatch_exceeds_the_cap(lengths, dp_size, cap, multiple):
    plan = plan_microbatches(lengths, dp_size, cap, multiple)
    assert all(sum(lengths[i] for i in microbatch) <= cap for rank in plan.microbatches for microbatch in rank)


@given(LENGTHS, DP, CAP)
def test_ranks_differ_by_at_most_the_longest_sequence(lengths, dp_size, cap):
    plan = plan_microbatches(lengths, dp_size, cap)
    loads = [sum(lengths[i] for i in plan.sequences(rank)) for rank in range(dp_size)]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(LENGTHS, DP, CAP, MULTIPLE)
def test_count_is_within_twice_the_ideal(lengths, dp_size, cap, multiple):
    """Two half-empty micro-batches of a rank would have been merged: first-fit leaves at most one below half."""
    plan = plan_microbatches(lengths, dp_size, cap, multiple)
    heaviest = max(sum(lengths[i] for i in plan.sequences(rank)) for rank in range(dp_size))
    assert plan.num_microbatches < 2 * heaviest / cap + 1 + multiple


@given(LENGTHS, DP, CAP, MULTIPLE)
def test_local_positions_address_the_sequences_of_the_rank(lengths, dp_size, cap, multiple):
    plan = plan_microbatches(lengths, dp_size, cap, multiple)
    for rank in range(dp_size):
        mine = plan.sequences(rank)
        assert list(mine) == sorted(mine)
        back = tuple(tuple(mine[i] for i in microbatch) for microbatch in plan.local(rank))
        assert back == plan.microbatches[rank]


@given(LENGTHS, DP, CAP, MULTIPLE)
def test_lists_and_arrays_of_lengths_give_one_plan(lengths, dp_size, cap, multiple):
    plan = plan_microbatches(lengths, dp_size, cap, multiple)
    assert plan == plan_microbatches(np.array(lengths, dtype=np.int32), dp_size, cap, multiple)


def test_a_rank_without_sequences_gets_empty_microbatches():
    plan = plan_microbatches([5], dp_size=3, max_tokens=8)
    assert plan.microbatches == (((0,),), ((),), ((),))


def test_longest_sequences_are_dealt_first():
    plan = plan_microbatches([1, 9, 2, 8], dp_size=2, max_tokens=20)
    assert plan.microbatches == (((1, 0),), ((3, 2),))


def test_a_rank_with_room_spreads_its_sequences_evenly():
    """Rank 0 needs two micro-batches for 8 + 8; rank 1 could do with one of 16, but uses both."""
    plan = plan_microbatches([8, 4, 4, 4, 8, 4], dp_size=2, max_tokens=16, multiple_of=2)
    for rank in range(2):
        loads = [sum([8, 4, 4, 4, 8, 4][i] for i in microbatch) for microbatch in plan.microbatches[rank]]
        assert loads == [8, 8]


def test_a_sequence_over_the_cap_is_refused():
    with pytest.raises(ValueError, match=r"number 1 has 9 tokens.*algorithm\.max_tokens_per_microbatch=8.*at least 9"):
        plan_microbatches([3, 9], dp_size=1, max_tokens=8)


def test_planning_needs_no_torch():
    code = "import sys, megatron_rl.policy.microbatch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
