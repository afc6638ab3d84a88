"""Tensors from outside: buckets and pickles that are what they should be, and those that are not."""

from __future__ import annotations

import base64
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.engines.embedded.weights import WeightsError
from megatron_rl.engines.embedded.wire_tensors import entries_of, unflatten, unpickle_tensors
from tests.contract.trainer import FlattenedTensorMetadata, description, encode, flat, payload

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = st.lists(st.integers(0, 4), max_size=3)


def equal(found: list[tuple[str, torch.Tensor]], expected: list[tuple[str, torch.Tensor]]) -> bool:
    same = [n for n, _ in found] == [n for n, _ in expected]
    return same and all(
        a.dtype == b.dtype and torch.equal(a, b) for (_, a), (_, b) in zip(found, expected, strict=True)
    )


@settings(max_examples=30, deadline=None)
@given(shapes=st.lists(SHAPES, min_size=1, max_size=5), dtype=st.sampled_from(DTYPES))
def test_tensors_survive_every_form(shapes: list[list[int]], dtype: torch.dtype) -> None:
    tensors = [(f"t{i}", torch.randn(shape).to(dtype)) for i, shape in enumerate(shapes)]
    words = description(tensors)
    entries = entries_of(words["names"], words["dtypes"], words["shapes"])
    assert equal(unflatten(flat(tensors), entries), tensors)
    for flattened in (False, True):
        assert equal(unpickle_tensors(payload(tensors, flattened), flattened), tensors)


def test_views_and_parameters_arrive_as_what_they_show() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    tensors = [("view", whole[1:3, ::2]), ("turned", whole.T), ("parameter", torch.nn.Parameter(whole))]
    assert equal(unpickle_tensors(payload(tensors), False), tensors)


class Evil:
    """Runs something when it is unpickled."""

    def __init__(self, function: Any, *words: Any) -> None:
        self.call = (function, words)

    def __reduce__(self) -> Any:
        return self.call


def storage_that(evil: Evil) -> Evil:
    """A storage in whose own pickle something evil waits."""
    return Evil(torch.storage._load_from_bytes, pickle.dumps(evil))


@pytest.mark.parametrize("nested", [False, True], ids=["outside", "in a storage"])
@pytest.mark.parametrize("flattened", [False, True], ids=["list", "bucket"])
def test_nothing_from_a_pickle_is_called(tmp_path: Path, nested: bool, flattened: bool) -> None:
    trace = tmp_path / "trace"
    evil = Evil(os.mkdir, str(trace))
    assert pickle.loads(pickle.dumps(evil)) is None
    assert trace.exists(), "it would do harm"
    trace.rmdir()
    text = base64.b64encode(pickle.dumps([("a", storage_that(evil) if nested else evil)])).decode()
    with pytest.raises(WeightsError, match="cannot be read"):
        unpickle_tensors(text, flattened)
    assert not trace.exists()


@pytest.mark.parametrize(
    "function",
    [eval, exec, getattr, setattr, __import__, open, torch.load, torch.hub.load, pickle.loads],
    ids=lambda f: getattr(f, "__qualname__", str(f)),
)
def test_functions_that_lead_elsewhere_are_refused(function: Any) -> None:
    with pytest.raises(WeightsError, match="not allowed in it"):
        unpickle_tensors(base64.b64encode(pickle.dumps(Evil(function, "x"))).decode(), False)


def entry(**change: Any) -> FlattenedTensorMetadata:
    words = {"name": "a", "shape": torch.Size([2]), "dtype": torch.float32, "start_idx": 0, "end_idx": 8, "numel": 8}
    return FlattenedTensorMetadata(**{**words, **change})


def without(name: str) -> FlattenedTensorMetadata:
    made = entry()
    delattr(made, name)
    return made


BUFFER = torch.zeros(16, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("content", "flattened"),
    [
        pytest.param({"flattened_tensor": BUFFER, "metadata": [entry(end_idx=80)]}, True, id="beyond the buffer"),
        pytest.param({"flattened_tensor": BUFFER, "metadata": [entry(shape=torch.Size([3]))]}, True, id="other shape"),
        pytest.param({"flattened_tensor": BUFFER, "metadata": [entry(start_idx=2, end_idx=10)]}, True, id="unaligned"),
        pytest.param({"flattened_tensor": BUFFER, "metadata": [entry(dtype="float32")]}, True, id="dtype as text"),
        pytest.param({"flattened_tensor": BUFFER, "metadata": [without("dtype")]}, True, id="no dtype"),
        pytest.param({"flattened_tensor": BUFFER.float(), "metadata": [entry()]}, True, id="no bytes"),
        pytest.param({"flattened_tensor": 5, "metadata": [entry()]}, True, id="no tensor"),
        pytest.param({"metadata": [entry()]}, True, id="no buffer"),
        pytest.param([("a", BUFFER)], True, id="a list for a bucket"),
        pytest.param({"flattened_tensor": BUFFER, "metadata": []}, False, id="a bucket for a list"),
        pytest.param([("a", 5)], False, id="a number for a tensor"),
        pytest.param([("a", BUFFER, 1)], False, id="three words"),
        pytest.param(5, False, id="a number"),
    ],
)
def test_content_of_the_wrong_form_is_refused(content: Any, flattened: bool) -> None:
    with pytest.raises(WeightsError):
        unpickle_tensors(encode(content), flattened)


@pytest.mark.parametrize("change", [lambda t: t[: len(t) // 2], lambda t: "%" + t, lambda _: "", lambda _: "AAAA"])
def test_damaged_text_is_refused(change: Any) -> None:
    with pytest.raises(WeightsError, match="cannot be read"):
        unpickle_tensors(change(payload([("a", torch.ones(5))])), False)


@pytest.mark.parametrize("words", [(0, (100,), (1,)), (-1, (2,), (1,)), (0, (2,), (-1,)), (3, (2, 2), (2, 1))], ids=str)
def test_a_tensor_that_reaches_beyond_its_storage_is_refused(words: tuple[Any, ...]) -> None:
    storage = torch.zeros(4).untyped_storage()
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
    text = base64.b64encode(pickle.dumps([("a", Evil(torch._utils._rebuild_tensor_v2, typed, *words, False, {}))]))
    with pytest.raises(WeightsError, match="does not fit its storage"):
        unpickle_tensors(text.decode(), False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((["a"], ["float32"], []), "1 names, 1 dtypes, 0 shapes"),
        (([], [], []), "at least one"),
        ((["a"], ["float31"], [[1]]), "a: unknown dtype 'float31'"),
        ((["a"], ["nn"], [[1]]), "a: unknown dtype 'nn'"),
        ((["a"], ["float32"], [[-1]]), "a: negative dimension"),
    ],
)
def test_announcements_that_make_no_sense_are_refused(words: tuple[Any, ...], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        entries_of(*words)
