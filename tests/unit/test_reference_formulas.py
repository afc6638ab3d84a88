"""The reference of the tests at values worked out by hand, and the package's advantages against it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.advantages import WITHIN_GROUP, compute_advantages
from megatron_rl.algorithms.spec import AdvantageSpec
from tests import reference_loss
from tests.reference_loss import Recipe, Response


def response(ratios, advantage=1.0, rhos=None, reference=None, old=-1.0):
    """One whose tokens have these ratios π/π_old; its log-probs have a graph."""
    log_probs = (torch.tensor(ratios, dtype=torch.float64).log() + old).requires_grad_()
    like = torch.full_like(log_probs, old).detach()
    return Response(
        log_probs=log_probs,
        entropy=torch.full_like(like, 2.0),
        mask=torch.ones(len(ratios), dtype=torch.bool),
        advantages=torch.full_like(like, advantage),
        old=like,
        behaviour=None if rhos is None else like - torch.tensor(rhos, dtype=torch.float64).log(),
        reference=None if reference is None else log_probs.detach() + torch.tensor(reference, dtype=torch.float64),
    )


def loss_and_gradients(responses, **recipe):
    result = reference_loss.evaluate(responses, Recipe(**recipe))
    gradients = torch.autograd.grad(result.loss, [r.log_probs for r in responses])
    return result.loss.item(), [g.tolist() for g in gradients]


@pytest.mark.parametrize(
    ("recipe", "ratio", "advantage", "loss", "gradient"),
    [
        ({}, 1.1, 2.0, -2.2, -2.2),
        ({}, 1.5, 2.0, -2.56, 0.0),
        ({}, 0.5, 2.0, -1.0, -1.0),
        ({}, 0.5, -2.0, 1.6, 0.0),
        ({"dual_clip": 3.0}, 5.0, -2.0, 6.0, 0.0),
        ({"loss": "cispo", "eps_low": 1.0, "eps_high": 4.0}, 8.0, -2.0, 5.0 * 2.0 * (math.log(8.0) - 1.0), 10.0),
        ({"loss": "sapo"}, 1.0, 2.0, -4.0, -2.0),
        ({"loss": "sapo"}, 1.0, -2.0, 4.0 / 1.05, 2.0),
        ({"loss": "gmpo"}, 2.0, 1.0, -1.28, 0.0),
        ({"loss": "gmpo"}, 0.5, -1.0, 0.8, 0.0),
        ({"loss": "opmd", "tau": 0.5}, math.e, 2.0, 0.25, -1.5),
    ],
)
def test_one_token(recipe, ratio, advantage, loss, gradient):
    found, ((found_gradient,),) = loss_and_gradients([response([ratio], advantage)], **recipe)
    assert (found, found_gradient) == (pytest.approx(loss), pytest.approx(gradient))


def test_the_gradient_of_gspo_is_the_ratio_of_the_sequence_for_each_of_its_tokens():
    """Two responses: weights 1 / (2 · 2) and 1 / (3 · 2). s = exp((log 1.21 + log 1) / 2) = 1.1."""
    batch = [response([1.21, 1.0], 2.0), response([1.0, 1.0, 1.0], -1.0)]
    constants = {"normalisation": "seq_mean_token_mean", "eps_low": 0.2, "eps_high": 0.2}
    for name in ("gspo", "gspo_token"):
        loss, gradients = loss_and_gradients(batch, loss=name, **constants)
        assert loss == pytest.approx((-1.1 * 2.0 + 1.0) / 2)
        assert gradients[0] == pytest.approx([-2.0 * 1.1 / 4] * 2)
        assert gradients[1] == pytest.approx([1.0 / 6] * 3)


@pytest.mark.parametrize(
    ("recipe", "loss"),
    [
        ({"token_correction": "tis"}, -(2.0 + 1.5 + 0.25) / 3),
        ({"token_correction": "icepop", "token_bounds": (0.5, 5.0)}, -(4.0 + 1.5) / 3),
        ({"token_correction": "mis", "token_bounds": (0.5, 5.0)}, -2 / 3),
        ({"token_correction": "mis", "token_bounds": (0.5, 5.0), "renormalise": True}, -1.0),
        ({"sequence_bounds": (1.0, 1.2)}, -1.0),  # 1.5^(1/3) = 1.145
        ({"sequence_bounds": (1.2, 2.0)}, 0.0),
        ({"token_correction": "tis", "kl_coef": 1.0, "kl_unbiased": False, "kl": "k2"}, -(3.75 - 3.75 * 0.5) / 3),
        ({"token_correction": "tis", "entropy_coef": 0.1}, -3.75 / 3 - 0.2),
    ],
)
def test_corrections_on_policy(recipe, loss):
    """Ratios 1, advantage 1, ρ = 4, 1.5, 0.25, distance 1 to the reference, entropy 2."""
    batch = [response([1.0, 1.0, 1.0], 1.0, rhos=[4.0, 1.5, 0.25], reference=[1.0, -1.0, 1.0])]
    assert float(reference_loss.evaluate(batch, Recipe(**recipe)).loss) == pytest.approx(loss)


def test_kl_estimators():
    d = torch.tensor([0.5])
    near = response([1.0], 0.0, reference=[0.5])
    assert float(reference_loss.k3(d)) == pytest.approx(math.exp(0.5) - 1.5)
    # unbiased k3: d/dlogp of w k3(d) at w = 1 is k3 - (e^d - 1) = -d; biased: -(e^d - 1)
    assert loss_and_gradients([near], kl_coef=1.0)[1][0] == pytest.approx([-0.5])
    assert loss_and_gradients([near], kl_coef=1.0, kl_unbiased=False)[1][0] == pytest.approx([1 - math.exp(0.5)])
    assert loss_and_gradients([near], kl_coef=1.0, kl="k2")[1][0] == pytest.approx([-0.5])


@pytest.mark.parametrize(
    ("normalisation", "weights"),
    [
        ("token_mean", [1 / 4, 1 / 4, 0.0]),
        ("seq_mean_token_mean", [1 / 6, 1 / 2, 0.0]),
        ("constant", [1 / 20, 1 / 20, 0.0]),
    ],
)
def test_weights(normalisation, weights):
    recipe = Recipe(normalisation=normalisation, max_length=10.0)
    assert reference_loss.token_weights([3, 1, 0], recipe) == pytest.approx(weights)


@pytest.mark.parametrize(
    ("kind", "rewards", "expected"),
    [
        ("grpo", (1, 0, 0, 1), (1, -1, -1, 1)),
        ("grpo", (1, 0, 0, 0), (1.732, -0.577, -0.577, -0.577)),
        ("dr_grpo", (1, 0, 0, 0), (0.75, -0.25, -0.25, -0.25)),
        ("rloo", (1, 0, 0, 0), (1, -1 / 3, -1 / 3, -1 / 3)),
        ("reinforce_pp_baseline", (1, 0, 0, 1), (0.866, -0.866, -0.866, 0.866)),
    ],
)
def test_advantages_of_one_group(kind, rewards, expected):
    found = reference_loss.advantages(kind, rewards, [0] * 4, [1] * 4)
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("kind", WITHIN_GROUP)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_advantages_of_the_package_are_those_of_the_reference(kind, data):
    groups = data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=4)) * 2  # at least two of each
    size = len(groups)
    reward = st.sampled_from([0.0, 1.0, 0.5, -2.0, float("nan"), 1e-7])
    rewards = data.draw(st.lists(reward, min_size=size, max_size=size))
    tokens = data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    std, shift = data.draw(st.sampled_from(["population", "sample", "none"])), data.draw(st.booleans())
    alone = [sum(g == h and math.isfinite(r) for h, r in zip(groups, rewards, strict=True)) == 1 for g in groups]
    assume(not any(alone))  # nothing to be compared with; what happens then is pinned down in test_advantages.py
    found = compute_advantages(rewards, groups, tokens, [True] * size, AdvantageSpec(kind, std, shift))
    expected = reference_loss.advantages(kind, rewards, groups, tokens, std=std, shift_mean=shift)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
