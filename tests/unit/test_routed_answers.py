"""Routes of experts in engines' answers: read by both readers alike, cut to MoE layers, and refused with the fault."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rollout.answers import _Reader, parse_carefully, parse_generations
from megatron_rl.rollout.arrays import usual_answers
from megatron_rl.rollout.protocol import Prompt, ProtocolError, SamplingSettings, generate_request
from megatron_rl.rollout.routed import RouteFormat
from tests.unit.fake_sglang import META, Body, good_answer

WANTED = SamplingSettings(temperature=1.0, max_new_tokens=4, routes="s000000001-x")
FORMAT = RouteFormat("nowhere", num_layers=3, moe_layers=(1, 2), top_k=2, num_experts=8)
PROMPT = Prompt("r", np.array([1, 2, 3]), 0, 4, WANTED)


def routes(tokens: int, layers: int = 3, top_k: int = 2, experts: int = 8) -> np.ndarray:
    """int32 [tokens, layers, top_k] that tell token and layer; 0 in the first layer, which is dense."""
    index = np.arange(tokens)[:, None, None] + 3 * np.arange(layers)[None, :, None] + np.arange(top_k)
    found = (index % experts).astype(np.int32)
    found[:, 0] = 0
    return found


def text_of(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


def answer(values: Any, tokens: tuple[int, ...] = (5, 2), rid: str = "r") -> Body:
    made = good_answer(rid, list(tokens))
    if values is not None:
        made[META]["routed_experts"] = text_of(values) if isinstance(values, np.ndarray) else values
    return made


def body_of(*answers: Body) -> bytes:
    return json.dumps(answers, separators=(",", ":")).encode()


def read(body: bytes, *prompts: Prompt) -> list[Any]:
    return parse_generations(body, prompts or (PROMPT,), url="http://e", vocab_size=100, routes=FORMAT)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4),
    moe_layers=st.sampled_from([(0, 1, 2), (1, 2), (0, 2), (2,)]),
    experts=st.sampled_from([8, 256, 300]),
    spaces=st.booleans(),
)
def test_both_readers_give_the_rows_of_the_layers_with_experts(lengths, moe_layers, experts, spaces):
    form = RouteFormat("nowhere", 3, moe_layers, 2, experts)
    prompts, answers, expected = [], [], []
    for i, (asked, generated, routed) in enumerate(lengths):
        start = min(routed, asked)
        prompts.append(Prompt(f"r{i}", np.arange(asked), 0, 4, WANTED, routed=start))
        values = (routes(asked + generated - 1 - start, experts=experts) + i) % experts
        answers.append(answer(values.astype(np.int32), tuple(range(generated)), f"r{i}"))
        expected.append(values[:, list(moe_layers)])
    body = json.dumps(answers, separators=None if spaces else (",", ":")).encode()
    dense = 0 in moe_layers  # where the layer that has no experts is taken for one, an expert stands twice
    careful = [_Reader("u", prompt, 100, form) for prompt in prompts]
    usual = usual_answers(body, prompts, 100, form)
    if dense and any(len(rows) for rows in expected):
        assert usual is None
        with pytest.raises(ProtocolError, match="holds an expert twice"):
            parse_carefully(body, careful, "u")
        return
    assert (usual is None) == spaces
    for found in (usual or (), parse_carefully(body, careful, "u")):
        for one, rows in zip(found, expected, strict=len(found) > 0):
            assert one.rows.dtype == (np.uint8 if experts <= 256 else np.int16)
            np.testing.assert_array_equal(one.rows, rows)


def test_routes_are_asked_for_from_where_they_are_missing():
    body = json.loads(generate_request([PROMPT._replace(routed=3)]))
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 3)
    settings = SamplingSettings(temperature=1.0, max_new_tokens=4)
    assert "return_routed_experts" not in json.loads(generate_request([PROMPT._replace(settings=settings)]))


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (None, r"routed_experts is missing .* --enable-return-routed-experts .* engine.routed_experts=false"),
        (7, "must be a str, not int"),
        ("%%%", "is not base64"),
        ("AAAA", "is not base64 of int32 numbers"),
        (routes(5), ": 5 rows for 4 tokens"),
        (routes(3), ": 3 rows for 4 tokens"),
        (
            routes(4, layers=2),
            "4 a token; 4 tokens x 3 layers x top-2 = 6 a token are expected, 16 numbers came; does this engine",
        ),
        (routes(4, top_k=3), "9 a token"),
        (routes(5, top_k=1), "no whole rows; 4 tokens x 3 layers x top-2 = 6 a token are expected, 15 numbers came"),
        (routes(4) + np.int32(100), "holds expert 10[0-9], of 8"),
        (routes(4) - np.int32(9), "holds expert -[0-9], of 8"),
        (routes(4) * np.int32(0), "holds an expert twice for one token"),
    ],
)
def test_routes_that_cannot_be_those_asked_for_are_refused_in_one_message(values, complaint):
    with pytest.raises(ProtocolError, match=complaint) as raised:
        read(body_of(answer(values)))
    assert str(raised.value).startswith("engine http://e: /generate answer for r: field meta_info.routed_experts ")
    assert len(str(raised.value)) < 400


def test_what_the_layers_without_experts_hold_is_no_concern():
    values = routes(4)
    values[:, 0] = -77
    np.testing.assert_array_equal(read(body_of(answer(values)))[0].rows, routes(4)[:, 1:])


def aborted(made: Body) -> Body:
    made[META]["finish_reason"] = {"type": "abort", "message": "Aborted"}
    return made


def test_an_aborted_answer_may_come_with_or_without_routes():
    assert read(body_of(aborted(answer(routes(4)))))[0].rows.shape == (4, 2, 2)
    assert read(body_of(aborted(answer(None))))[0].rows is None
    assert read(body_of(aborted(answer(None, ()))))[0].rows is None
    assert read(body_of(aborted(answer(routes(2), ()))))[0].rows is None  # asked for again with the next segment
    with pytest.raises(ProtocolError, match="3 rows for 4 tokens"):
        read(body_of(aborted(answer(routes(3)))))


def test_the_word_in_a_text_is_not_taken_for_the_field():
    made = answer(routes(4))
    made["text"] = f'"routed_experts":"{text_of(routes(1))}"'
    for separators in ((",", ":"), None):
        body = json.dumps([{"text": made["text"], **made}], separators=separators).encode()
        np.testing.assert_array_equal(read(body)[0].rows, routes(4)[:, 1:])


def test_routes_are_not_looked_at_where_nobody_asked():
    settings = SamplingSettings(temperature=1.0, max_new_tokens=4)
    found = read(body_of(answer(routes(1))), PROMPT._replace(settings=settings))
    assert found[0].rows is None
