"""The deterministic mode over HTTP."""

from __future__ import annotations

import pytest

from tests.contract.servers import Server


def test_same_bits_alone_and_among_others(deterministic_server: Server) -> None:
    server = deterministic_server
    prompts = [[5 + (3 * i + j) % 200 for j in range(1 + 6 * i)] for i in range(10)]
    params = [
        {"max_new_tokens": 20 + i, "temperature": 0.5 + 0.1 * i, "top_p": 1.0 if i % 2 else 0.9, "sampling_seed": i}
        for i in range(10)
    ]
    alone = [server.generate(p, sampling_params=s) for p, s in zip(prompts, params, strict=True)]
    noise = [server.generate_later([[7, 8, 9, 10 + i]] * 3, max_new_tokens=90, temperature=1.3) for i in range(3)]
    among = server.generate(prompts[::-1], sampling_params=params[::-1])[::-1]
    for future in noise:
        future.result(60)
    for one, other in zip(alone, among, strict=True):
        assert one["output_ids"] == other["output_ids"]
        assert one["meta_info"]["output_token_logprobs"] == other["meta_info"]["output_token_logprobs"]


@pytest.mark.parametrize("flush", [False, True], ids=["cached", "flushed"])
def test_a_response_in_segments_has_the_bits_of_a_whole_one(deterministic_server: Server, flush: bool) -> None:
    server = deterministic_server
    prompt, params = [9, 8, 7, 6, 5], {"temperature": 0.9, "sampling_seed": 3, "ignore_eos": True}
    whole = server.generate(prompt, max_new_tokens=60, **params)
    tokens, entries = list(prompt), []
    for count in (1, 15, 16, 17, 11):
        if flush:
            server.ok("/flush_cache", {})
        part = server.generate(tokens, max_new_tokens=count, **params)
        tokens += part["output_ids"]
        entries += part["meta_info"]["output_token_logprobs"]
    assert tokens == prompt + whole["output_ids"]
    assert entries == whole["meta_info"]["output_token_logprobs"]


def test_fixed_shapes_compute_the_same_model(deterministic_server: Server, reference) -> None:
    prompt = [4 + i for i in range(37)]
    answer = deterministic_server.generate(prompt, max_new_tokens=30, temperature=0, ignore_eos=True)
    assert answer["output_ids"] == reference.greedy(prompt, 30)
    found = [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]
    assert found == pytest.approx(reference.log_probs(prompt, answer["output_ids"], 1.0).tolist(), abs=1e-5)
