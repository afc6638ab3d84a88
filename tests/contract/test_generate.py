"""POST /generate: the form of answers, and log-probs held to transformers' full forward pass."""

from __future__ import annotations

import numpy as np
import pytest

from tests.contract.conftest import Reference
from tests.contract.servers import Server, generate_body

PROMPT = [5, 6, 7, 8, 9, 10, 11]


def output_log_probs(answer: dict) -> np.ndarray:
    entries = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in entries] == answer["output_ids"]
    return np.array([value for value, _, _ in entries], np.float32)


def test_single_answer_has_the_fields_of_the_protocol(server: Server) -> None:
    answer = server.generate(PROMPT, rid="fields-1", max_new_tokens=3, ignore_eos=True, temperature=0)
    assert isinstance(answer, dict)
    assert len(answer["output_ids"]) == 3
    meta = answer["meta_info"]
    assert meta["id"] == "fields-1"
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 3)
    assert meta["cached_tokens"] < len(PROMPT)
    assert meta["num_retractions"] == 0
    assert meta["weight_version"] == "w0"
    assert meta["weight_versions"] == [{"version": "w0", "start": 0, "end": 3}]
    assert all(len(entry) == 3 and entry[2] is None for entry in meta["output_token_logprobs"])


def test_log_probs_are_left_out_unless_asked_for(server: Server) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
    meta = server.ok("/generate", body)["meta_info"]
    assert "output_token_logprobs" not in meta
    assert "input_token_logprobs" not in meta


def test_greedy_tokens_and_log_probs_equal_transformers(server: Server, reference: Reference) -> None:
    answer = server.generate(PROMPT, max_new_tokens=24, temperature=0, ignore_eos=True)
    assert answer["output_ids"] == reference.greedy(PROMPT, 24)
    expected = reference.log_probs(PROMPT, answer["output_ids"], 1.0)
    np.testing.assert_allclose(output_log_probs(answer), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [1, 17, 70, 200])
def test_log_probs_of_sampled_tokens_are_those_of_the_tempered_distribution(
    server: Server, reference: Reference, length: int
) -> None:
    prompt = [4 + i * 7 % 250 for i in range(length)]
    answer = server.generate(prompt, max_new_tokens=40, temperature=0.7, ignore_eos=True)
    found = output_log_probs(answer)
    np.testing.assert_allclose(found, reference.log_probs(prompt, answer["output_ids"], 0.7), rtol=0, atol=1e-5)
    assert np.abs(found - reference.log_probs(prompt, answer["output_ids"], 1.0)).max() > 1e-2


def test_input_log_probs_begin_with_null_and_ignore_the_temperature(server: Server, reference: Reference) -> None:
    expected = reference.log_probs(PROMPT[:1], PROMPT[1:], 1.0)
    answer = server.generate(PROMPT, max_new_tokens=1, temperature=0.5, logprob_start_len=0)
    entries = answer["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in entries] == PROMPT
    assert entries[0][0] is None
    np.testing.assert_allclose([value for value, _, _ in entries[1:]], expected, rtol=0, atol=1e-5)


def test_batch_answers_in_order_with_parameters_of_each(server: Server, reference: Reference) -> None:
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [5, 6, 7], [20, 21], [22, 23, 24]]  # more than run at once
    params = [{"max_new_tokens": 2 + i, "temperature": 0, "ignore_eos": True} for i in range(len(prompts))]
    rids = [f"batch-{i}." for i in range(len(prompts))]
    answers = server.generate(prompts, rid=rids, sampling_params=params)
    assert [a["meta_info"]["id"] for a in answers] == rids
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer["output_ids"] == reference.greedy(prompt, 2 + i)
        expected = reference.log_probs(prompt, answer["output_ids"], 1.0)
        np.testing.assert_allclose(output_log_probs(answer), expected, rtol=0, atol=1e-5)


def test_batch_of_one_is_answered_by_a_list(server: Server) -> None:
    answers = server.generate([PROMPT], max_new_tokens=1)
    assert isinstance(answers, list)
    assert len(answers) == 1


def test_n_samples_are_listed_prompt_by_prompt_and_share_the_prefix(server: Server) -> None:
    answers = server.generate([PROMPT, PROMPT[:4]], n=3, max_new_tokens=8, temperature=1.0, ignore_eos=True)
    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [7] * 3 + [4] * 3
    assert len({a["meta_info"]["id"] for a in answers}) == 6
    shared = [a["meta_info"]["cached_tokens"] for a in answers[:3]]
    assert sorted(shared)[1:] == [len(PROMPT) - 1] * 2
    assert len({tuple(a["output_ids"]) for a in answers[:3]}) == 3
    single = server.generate(PROMPT, n=2, max_new_tokens=1)
    assert len(single) == 2


def test_stop_token_ends_the_output_and_is_part_of_it(server: Server, reference: Reference) -> None:
    expected = reference.greedy(PROMPT, 6)
    stop = expected[3]
    first = expected.index(stop)
    answer = server.generate(PROMPT, max_new_tokens=first + 1, temperature=0, stop_token_ids=[stop])
    assert answer["output_ids"] == expected[: first + 1]
    # The same token exhausts max_new_tokens: stopping comes first.
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_end_of_sequence_token_of_the_model_stops_unless_ignored(server: Server, reference: Reference) -> None:
    prompt = reference.prompt_before(2)
    ended = server.generate(prompt, max_new_tokens=5, temperature=0)
    assert ended["output_ids"] == [2]
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    ignored = server.generate(prompt, max_new_tokens=5, temperature=0, ignore_eos=True, stop_token_ids=[2])
    assert ignored["output_ids"] == reference.greedy(prompt, 5)
    assert ignored["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


def test_no_new_tokens_means_an_empty_answer(server: Server) -> None:
    answer = server.generate(PROMPT, max_new_tokens=0, logprob_start_len=0)
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert answer["meta_info"]["output_token_logprobs"] == []
    assert len(answer["meta_info"]["input_token_logprobs"]) == len(PROMPT)


def test_generation_stops_two_tokens_before_the_end_of_the_context(server: Server) -> None:
    """A prompt must leave more than that."""
    prompt = [5 + i % 200 for i in range(4096 - 7)]
    answer = server.generate(prompt, max_new_tokens=7, ignore_eos=True)
    assert answer["meta_info"]["completion_tokens"] == 5
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    refused = server.call("/generate", generate_body([*prompt, 5], max_new_tokens=1))
    assert refused.status == 400
    assert "Input length (4090 tokens) exceeds the maximum allowed length (4090 tokens)" in refused.message
