"""The quick reader of answers beside the careful one."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rollout.answers import _Reader, parse_carefully
from megatron_rl.rollout.arrays import usual_answers
from megatron_rl.rollout.protocol import EngineError, Prompt, SamplingSettings
from tests.unit.fake_sglang import META, drop, good_answer, put

SETTINGS = SamplingSettings(temperature=1.0, max_new_tokens=4, stop_token_ids=(2,))

DAMAGES = [
    lambda answer: answer[META]["output_token_logprobs"].append([-1.0, 5, None]),
    lambda answer: answer[META]["output_token_logprobs"].append([None, 5, None]),
    lambda answer: answer[META]["output_token_logprobs"].append(["x", 5, None]),
    lambda answer: answer[META]["output_token_logprobs"].clear(),
    put(None, META, "output_token_logprobs"),
    put([200], "output_ids"),
    put("abort", META, "finish_reason", "type"),
    drop(META, "finish_reason"),
]


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 99), st.floats(-50, 0, width=32)), max_size=4), max_size=3), st.data()
)
def test_the_quick_reader_says_what_the_careful_one_says_or_nothing(sequences, data):
    """Also of answers that were changed somewhere: it may never let pass what the other refuses."""
    answers = [good_answer(f"r{i}", [t for t, _ in sequence]) for i, sequence in enumerate(sequences)]
    for answer, sequence in zip(answers, sequences, strict=True):
        answer[META]["output_token_logprobs"] = [[value, token, None] for token, value in sequence]
    if answers and data.draw(st.booleans()):
        data.draw(st.sampled_from(DAMAGES))(answers[0])
    body = json.dumps(answers, separators=(",", ":")).encode()
    prompts = [Prompt(f"r{i}", np.array([1]), 0, 3, SETTINGS) for i in range(len(answers))]
    usual = usual_answers(body, prompts, 100)
    try:
        careful = parse_carefully(body, [_Reader("u", prompt, 100, None) for prompt in prompts], "u")
    except EngineError:
        careful = None
    if usual is not None:
        assert careful is not None
        for (tokens, log_probs, _, reason, _), other in zip(usual, careful, strict=True):
            np.testing.assert_equal((tokens, log_probs, reason), (other.tokens, other.log_probs, other.finish_reason))
    elif careful is not None:
        assert any(g.finish_reason == "abort" or not len(g.tokens) for g in careful), "a usual answer was left to it"
