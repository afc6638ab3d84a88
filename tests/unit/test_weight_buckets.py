"""Buckets of tensors: none is lost, none overlaps, none is too large; and a bucket as a file."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron_rl.weights.buckets import Bucket, TensorSpec, plan_buckets, write_safetensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]
shapes = st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple)
groups_of_shapes = st.lists(st.lists(shapes, min_size=1, max_size=3), max_size=12)


def specs(groups: list[list[tuple[int, ...]]], dtype: torch.dtype = torch.float32) -> list[list[TensorSpec]]:
    return [[TensorSpec(f"t{i}.{j}", shape, dtype) for j, shape in enumerate(group)] for i, group in enumerate(groups)]


@given(groups_of_shapes, st.integers(1, 600))
def test_a_plan_keeps_order_and_groups_and_the_limit(groups: list[list[tuple[int, ...]]], capacity: int) -> None:
    planned = specs(groups)
    buckets = plan_buckets(planned, capacity)
    assert [tensor for bucket in buckets for tensor in bucket.tensors] == [t for group in planned for t in group]
    where = {tensor.name: number for number, bucket in enumerate(buckets) for tensor in bucket.tensors}
    assert all(len({where[tensor.name] for tensor in group}) == 1 for group in planned)
    for bucket in buckets:
        alone = len({tensor.name.partition(".")[0] for tensor in bucket.tensors}) == 1
        assert bucket.nbytes <= capacity or alone


@given(groups_of_shapes)
def test_a_plan_is_not_wasteful(groups: list[list[tuple[int, ...]]]) -> None:
    buckets = plan_buckets(specs(groups), 200)
    for before, bucket in pairwise(buckets):
        first = bucket.tensors[0].name.partition(".")[0]
        assert before.nbytes + sum(t.nbytes for t in bucket.tensors if t.name.startswith(first + ".")) > 200


@given(st.lists(st.tuples(shapes, st.sampled_from([*DTYPES, torch.float8_e4m3fn])), min_size=1), st.integers(1, 600))
def test_tensors_of_any_formats_begin_where_their_numbers_can(
    tensors: list[tuple[tuple[int, ...], torch.dtype]], capacity: int
) -> None:
    planned = [[TensorSpec(f"t{i}", shape, dtype)] for i, (shape, dtype) in enumerate(tensors)]
    buckets = plan_buckets(planned, capacity)
    for bucket in buckets:
        views = bucket.views(torch.zeros(bucket.nbytes, dtype=torch.uint8))
        assert all((views[t.name].shape, views[t.name].dtype) == (t.shape, t.dtype) for t in bucket.tensors)
    assert sorted(t.name for bucket in buckets for t in bucket.tensors) == sorted(t.name for [t] in planned)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_share_the_buffer_and_lie_side_by_side(dtype: torch.dtype) -> None:
    bucket = Bucket((TensorSpec("a", (2, 3), dtype), TensorSpec("b", (), dtype), TensorSpec("c", (4,), dtype)))
    flat = torch.zeros(bucket.nbytes + 16, dtype=torch.uint8)
    for number, view in enumerate(bucket.views(flat).values(), start=1):
        view.fill_(number)
    assert flat[: bucket.nbytes].view(dtype).tolist() == [1] * 6 + [2] + [3] * 4
    assert not flat[bucket.nbytes :].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_reads_as_what_was_in_the_bucket(dtype: torch.dtype, tmp_path: Path) -> None:
    bucket = Bucket((TensorSpec("first", (3, 5), dtype), TensorSpec("läst", (7,), dtype)))
    flat = torch.randint(0, 256, (bucket.nbytes + 100,), dtype=torch.uint8)
    write_safetensors(tmp_path / "f.safetensors", bucket, flat)
    found = load_file(tmp_path / "f.safetensors")
    assert found.keys() == {"first", "läst"}
    for name, view in bucket.views(flat).items():
        assert (found[name].dtype, found[name].shape) == (view.dtype, view.shape)
        assert torch.equal(found[name].view(torch.uint8), view.view(torch.uint8))


def test_writing_a_file_copies_nothing(tmp_path: Path) -> None:
    bucket = Bucket((TensorSpec("large", (2**22,), torch.float32),))
    flat = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    tracemalloc.start()
    write_safetensors(tmp_path / "f.safetensors", bucket, flat)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < bucket.nbytes // 16
