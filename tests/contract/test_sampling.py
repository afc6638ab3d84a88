"""What sampling parameters do to the distribution, and what seeds promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.contract.conftest import Reference
from tests.contract.servers import Server

PROMPT = [30, 31, 32, 33]


def allowed(logits: torch.Tensor, temperature: float, top_p: float, top_k: int, min_p: float) -> set[int]:
    probs = torch.softmax(logits.double() / temperature, dim=-1)
    ordered, order = probs.sort(descending=True)
    keep = torch.arange(len(probs)) < top_k
    keep &= (ordered.cumsum(0) - ordered) <= top_p + 1e-6
    keep &= ordered >= min_p * ordered[0] - 1e-6
    return set(order[keep].tolist())


@pytest.mark.parametrize(("top_p", "top_k", "min_p"), [(0.5, -1, 0.0), (1.0, 3, 0.0), (1.0, -1, 0.3), (0.8, 5, 0.1)])
def test_filters_bound_the_tokens_and_leave_the_log_probs_alone(
    server: Server, reference: Reference, top_p: float, top_k: int, min_p: float
) -> None:
    params = {"temperature": 0.9, "top_p": top_p, "top_k": top_k, "min_p": min_p, "ignore_eos": True}
    answer = server.generate(PROMPT, max_new_tokens=60, **params)
    output = answer["output_ids"]
    logits = reference.logits(PROMPT + output)
    for place, token in enumerate(output, len(PROMPT) - 1):
        assert token in allowed(logits[place], 0.9, top_p, 10**9 if top_k == -1 else top_k, min_p)
    found = [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]
    np.testing.assert_allclose(found, reference.log_probs(PROMPT, output, 0.9), rtol=0, atol=1e-5)
    assert output != reference.greedy(PROMPT, 60)


def test_tokens_are_drawn_from_the_distribution(server: Server, reference: Reference) -> None:
    count = 4000 if server.kind == "embedded" else 1000  # which takes a real SGLang seconds
    params = [{"max_new_tokens": 1, "sampling_seed": seed} for seed in range(count)]
    answers = server.generate([PROMPT] * count, sampling_params=params)
    probs = torch.softmax(reference.logits(PROMPT)[-1], dim=-1).numpy()
    counts = np.bincount([a["output_ids"][0] for a in answers], minlength=len(probs))
    expected = probs * count
    common = expected > 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    # Chi-square: its mean is the degrees of freedom, its variance twice that; six deviations do not happen by chance.
    freedom = common.sum() - 1
    assert freedom > 20
    assert statistic < freedom + 6 * np.sqrt(2 * freedom)


def test_equal_seeds_repeat_and_others_do_not(server: Server) -> None:
    if not server.seeded:
        pytest.skip("this server ignores sampling_seed")
    params = {"max_new_tokens": 32, "temperature": 1.0, "ignore_eos": True}
    first = server.generate(PROMPT, sampling_seed=17, **params)["output_ids"]
    batch = server.generate([PROMPT] * 3, sampling_params=[{**params, "sampling_seed": s} for s in (18, 17, -17)])
    assert [b["output_ids"] == first for b in batch] == [False, True, False]


def test_a_resumed_sequence_goes_on_as_if_it_had_not_been_interrupted(server: Server) -> None:
    if not server.seeded:
        pytest.skip("this server ignores sampling_seed")
    params = {"temperature": 1.0, "ignore_eos": True, "sampling_seed": 5}
    whole = server.generate(PROMPT, max_new_tokens=40, **params)["output_ids"]
    rest = server.generate(PROMPT + whole[:15], max_new_tokens=25, **params)["output_ids"]
    assert whole[15:] == rest


def test_without_a_seed_calls_differ(server: Server) -> None:
    params = {"max_new_tokens": 16, "ignore_eos": True, "sampling_seed": None}
    outputs = [tuple(server.generate(PROMPT, **params)["output_ids"]) for _ in range(3)]
    assert len(set(outputs)) == 3
