"""The record: invariants of samples and groups, names, seeds, and what survives the trip through bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rollout.sample import Group, Sample, Span, group_name, group_of, sample_name, sampling_seed
from megatron_rl.rollout.wire import RolloutShard, RolloutTable, decode, encode, pack_groups, unpack_groups
from megatron_rl.routes import RoutePart

group_ids = st.integers(0, 10**9 - 1)
positions = st.integers(0, 999)
pieces = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=5)
"""A response in pieces; each number is the weight version of one token."""


def spans_of(versions: list[int]) -> list[Span]:
    return [Span(version, i, i + 1) for i, version in enumerate(versions)]


def grown(response: list[list[int]]) -> Sample:
    sample = Group.start(7, "p", np.arange(3), 1, run_seed=0, version=0, temperature=1.0).samples[0]
    for versions in response:
        count = len(versions)
        sample.append(range(count), -np.arange(1.0, count + 1), spans_of(versions))
    return sample


@given(pieces)
def test_per_token_arrays_have_equal_lengths_and_spans_cover_them_whatever_is_appended(response: list[list[int]]):
    sample = grown(response)
    versions = [v for piece in response for v in piece]
    assert sample.response_length == len(sample.log_probs) == len(sample.loss_mask) == len(versions)
    assert [s.version for s in sample.spans for _ in range(s.start, s.end)] == versions
    assert all(a.version != b.version for a, b in zip(sample.spans, sample.spans[1:], strict=False))
    assert sample.trainable_tokens == len(versions)
    assert (sample.version_first, sample.version_last) == (min(versions, default=-1), max(versions, default=-1))


@pytest.mark.parametrize(
    ("tokens", "log_probs", "spans", "complaint"),
    [
        ([1, 2], [-1.0], [Span(0, 0, 2)], "2.*tokens but.*1.*log-probs"),
        ([1, 2], [-1.0, float("nan")], [Span(0, 0, 2)], "not finite"),
        ([1, 2], [-1.0, -1.0], [Span(0, 0, 1)], "do not cover 2 tokens"),
        ([1, 2], [-1.0, -1.0], [Span(0, 0, 1), Span(1, 0, 2)], "do not cover"),
        ([1, 2], [-1.0, -1.0], [], "do not cover"),
    ],
)
def test_what_would_break_an_invariant_is_refused_and_changes_nothing(tokens, log_probs, spans, complaint):
    sample = grown([[0, 0]])
    with pytest.raises(ValueError, match=complaint):
        sample.append(tokens, log_probs, spans)
    assert sample.response_length == len(sample.log_probs) == 2


def test_routes_go_on_where_the_last_ended_and_reach_the_token_before_the_last():
    sample = grown([])
    sample.append([1, 2], [-1.0, -1.0], [Span(0, 0, 2)], RoutePart("f", 0, 0, 4))
    assert (sample.routed, sample.prompt_length) == (4, 3)
    sample.append_observation([8, 9])
    for part in (RoutePart("f", 9, 3, 4), RoutePart("f", 9, 4, 2), RoutePart("f", 9, 5, 2)):
        with pytest.raises(ValueError, match=r"where those of \[4, 7\) are missing"):
            sample.append([1], [-1.0], [Span(0, 0, 1)], part)
    assert sample.response_length == 4
    sample.append([1], [-1.0], [Span(0, 0, 1)])  # an answer without routes leaves them to the next
    sample.append([1], [-1.0], [Span(0, 0, 1)], RoutePart("f", 9, 4, 4))
    assert (sample.routed, len(sample.routes)) == (8, 2)


def test_nothing_can_be_appended_to_a_finished_sample():
    sample = grown([[0]])
    sample.finish("stop")
    with pytest.raises(ValueError, match="is finished"):
        sample.append([1], [-1.0], [Span(0, 0, 1)])


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 9)), min_size=1, max_size=5))
def test_an_observation_is_outside_of_the_loss_and_counts_as_the_newest_weights(turns: list[tuple[int, int, int]]):
    sample = grown([])
    for sampled, observed, version in turns:
        sample.append(range(sampled), [-1.0] * sampled, [Span(version, 0, sampled)])
        newest = sample.version_last
        sample.finish("stop")
        sample.reopen()
        sample.append_observation([7] * observed)
        assert sample.spans[-1].end == sample.response_length
        assert sample.spans[-1].version == newest
    expected = [mark for sampled, observed, _ in turns for mark in [True] * sampled + [False] * observed]
    assert sample.loss_mask.tolist() == sample.sampled.tolist() == expected
    assert not sample.log_probs[~sample.loss_mask].any()
    assert [end - start for start, end in sample.turns] == [sampled for sampled, _, _ in turns]
    sample.exclude()
    assert sample.sampled.tolist() == expected


def test_an_observation_without_tokens_or_before_any_turn_is_refused():
    for sample, tokens in ((grown([[0]]), []), (grown([]), [1])):
        with pytest.raises(ValueError, match="follows sampled ones"):
            sample.append_observation(tokens)


@given(st.lists(st.tuples(st.sampled_from("se"), group_ids, positions), min_size=2, max_size=20, unique=True))
def test_no_sample_id_is_a_prefix_of_another_and_all_have_the_same_width(keys):
    names = [sample_name(group, k, kind) for kind, group, k in keys]
    assert len({len(n) for n in names}) == 1
    assert not any(a.startswith(b) for a in names for b in names if a is not b)


@given(group_ids, group_ids, positions)
def test_a_groups_name_is_a_prefix_of_its_own_samples_only(mine, other, k):
    assert sample_name(other, k).startswith(group_name(mine)) == (mine == other)
    assert group_of(sample_name(mine, k)) == group_name(mine)


def test_sampling_seeds_are_fixed_for_all_time_and_differ_between_samples_groups_runs_and_kinds():
    assert sampling_seed(0, 0, 0) == 1201498448  # a resumed run draws what the first one drew
    seeds = [sampling_seed(r, g, k, kind) for r in range(3) for g in range(20) for k in range(8) for kind in "se"]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)


@given(st.lists(st.sampled_from([0.0, 1.0, 1e-9, float("nan")]), min_size=1, max_size=6))
def test_a_group_is_informative_when_the_known_correctness_varies(values):
    group = Group.start(0, "p", np.arange(2), len(values), run_seed=0, version=0, temperature=1.0)
    for sample, value in zip(group.samples, values, strict=True):
        sample.score(value, value, {})
    known = {v for v in values if v == v}
    assert group.informative == (1.0 in known and bool(known & {0.0, 1e-9}))


def make_groups() -> list[Group]:
    groups = []
    for group_id in (3, 5):
        prompt = np.arange(group_id)
        group = Group.start(group_id, f"prompt-{group_id}", prompt, 2, run_seed=1, version=4, temperature=0.5)
        for k, sample in enumerate(group.samples):
            length = k + group_id
            sample.append(np.arange(length), -np.arange(length, dtype=float), [Span(4, 0, 2), Span(5, 2, length)])
            sample.finish("length" if k else "stop")
            sample.text = f"réponse {k}"
            sample.score(float(k), float("nan") if group_id == 5 else float(k), {"format": 0.5, "math": float("nan")})
        groups.append(group)
    groups[0].samples[1].exclude()
    groups[0].samples[1].routes = [RoutePart("a.u1", 70, 0, 3), RoutePart("b.u1", 0, 3, 3)]
    groups[0].samples[0].observations, groups[0].samples[0].environment_reward = [(1, 2)], 0.5
    groups[1].samples[0].reward = float("nan")
    return groups


def assert_same(a: object, b: object) -> None:
    """Equal field by field; NaN equals NaN, arrays also in dtype."""
    for name, value in vars(a).items():
        other = vars(b)[name]
        if isinstance(value, np.ndarray):
            assert value.dtype == other.dtype, name
        np.testing.assert_equal(other, value, err_msg=name)


def test_groups_survive_the_trip_through_bytes():
    groups = make_groups()
    arrays, values = pack_groups(groups)
    arrays, metadata = decode(encode(arrays, {"groups": values}))
    back = unpack_groups(arrays, metadata["groups"])
    assert [(g.id, g.prompt_id, g.version) for g in back] == [(3, "prompt-3", 4), (5, "prompt-5", 4)]
    for group, restored in zip(groups, back, strict=True):
        for sample, other in zip(group.samples, restored.samples, strict=True):
            assert_same(sample, other)


def test_no_groups_survive_as_well():
    arrays, values = pack_groups([])
    assert unpack_groups(*[decode(encode(arrays, {}))[0], values]) == []


def test_a_table_has_one_row_per_sample_in_order_and_survives_the_trip():
    table = RolloutTable.of(make_groups(), ["a", "b"], {"rollout/epoch": 1.0})
    assert table.sample_ids == ["s000000003-000.", "s000000003-001.", "s000000005-000.", "s000000005-001."]
    assert table.group_index.tolist() == [0, 0, 1, 1]
    assert table.sources == ["a", "a", "b", "b"]
    assert table.prompt_length.tolist() == [3, 3, 5, 5]
    assert table.response_length.tolist() == [3, 4, 5, 6]
    assert table.trainable_tokens.tolist() == [3, 0, 5, 6]
    assert table.valid.tolist() == [True, True, False, True]
    assert table.truncated.tolist() == [False, True, False, True]
    assert table.informative.tolist() == [True, True, False, False]
    assert table.version_first.tolist() == [4] * 4
    assert table.version_last.tolist() == [5] * 4
    assert table.components["format"].tolist() == [0.5] * 4
    assert_same(table, RolloutTable.from_bytes(table.to_bytes()))


def test_a_shard_aligns_masks_and_log_probs_with_prompt_and_response_tokens():
    samples = [s for g in make_groups() for s in g.samples]
    shard = RolloutShard.from_bytes(RolloutShard.of([samples[2], samples[1]]).to_bytes())
    assert shard.sample_ids == ["s000000005-000.", "s000000003-001."]
    assert shard.offsets.tolist() == [0, 10, 17]
    assert shard.tokens.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]
    assert shard.mask.tolist() == [False] * 5 + [True] * 5 + [False] * 7
    assert shard.behaviour_log_probs[5:10].tolist() == [0, -1, -2, -3, -4]
    assert not shard.behaviour_log_probs[:5].any()
    assert shard.temperature.tolist() == [0.5, 0.5]
    assert shard.routes == [[], [RoutePart("a.u1", 70, 0, 3), RoutePart("b.u1", 0, 3, 3)]]
    assert (shard.tokens.dtype, shard.behaviour_log_probs.dtype, shard.mask.dtype) == (np.int64, np.float32, np.bool_)


def test_bytes_that_are_cut_off_are_refused():
    blob = RolloutTable.of(make_groups(), ["a", "b"], {}).to_bytes()
    with pytest.raises(ValueError, match="not a safetensors blob"):
        RolloutTable.from_bytes(blob[: len(blob) // 2])
