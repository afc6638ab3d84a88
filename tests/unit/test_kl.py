"""KL estimators: their values, and that the unbiased forms have the gradient of the KL itself."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.kl import k3, kl_in_reward, kl_penalty, safe_exp

PROPERTY = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)


def random_distributions(seed, vocab=6):
    """Logits of the policy (with gradient) and log-probs of reference and old policy, all over one small vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    logits, reference, old = torch.randn(3, vocab, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), reference.log_softmax(-1), old.log_softmax(-1)


def exact_kl_gradient(logits, reference):
    p = logits.log_softmax(-1)
    return torch.autograd.grad((p.exp() * (p - reference)).sum(), logits)[0]


@given(seed=SEEDS)
@PROPERTY
def test_unbiased_k3_has_the_expected_gradient_of_the_kl_whoever_sampled(seed):
    logits, reference, old = random_distributions(seed)
    penalty = kl_penalty(logits.log_softmax(-1), reference, old, estimator="k3", unbiased=True)
    expected = torch.autograd.grad((old.exp() * penalty).sum(), logits)[0]
    torch.testing.assert_close(expected, exact_kl_gradient(logits, reference), rtol=1e-9, atol=1e-12)


@given(seed=SEEDS)
@PROPERTY
def test_unbiased_k2_has_the_expected_gradient_of_the_kl_whoever_sampled(seed):
    logits, reference, old = random_distributions(seed)
    penalty = kl_penalty(logits.log_softmax(-1), reference, old, estimator="k2", unbiased=True)
    expected = torch.autograd.grad((old.exp() * penalty).sum(), logits)[0]
    torch.testing.assert_close(expected, exact_kl_gradient(logits, reference), rtol=1e-9, atol=1e-12)


@given(seed=SEEDS)
@PROPERTY
def test_unbiased_k3_has_the_expected_value_of_the_kl(seed):
    logits, reference, old = random_distributions(seed)
    logp = logits.detach().log_softmax(-1)
    penalty = kl_penalty(logp, reference, old, estimator="k3", unbiased=True)
    torch.testing.assert_close((old.exp() * penalty).sum(), (logp.exp() * (logp - reference)).sum())


@given(d=st.floats(-19, 19))
@PROPERTY
def test_plain_estimators_are_their_formulas(d):
    logp, reference = torch.tensor([-25.0], dtype=torch.float64), torch.tensor([-25.0 + d], dtype=torch.float64)
    for estimator, expected in (("k2", d * d / 2), ("k3", np.exp(d) - d - 1)):
        found = kl_penalty(logp, reference, logp, estimator=estimator, unbiased=False)
        assert float(found) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_penalty_and_gradient_are_finite_at_any_distance(estimator, unbiased, gap):
    logp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    penalty = kl_penalty(logp, logp.detach() + gap, logp.detach() - gap, estimator=estimator, unbiased=unbiased)
    (gradient,) = torch.autograd.grad(penalty.sum(), logp)
    assert torch.isfinite(penalty).all()
    assert torch.isfinite(gradient).all()


def test_k3_has_no_gradient_where_its_clamp_binds():
    d = torch.tensor([-1e4, -21.0, 21.0, 1e4], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(k3(d).sum(), d)
    assert gradient.tolist() == [0.0] * 4


def test_safe_exp_is_clamped_to_20_with_zero_gradient_beyond():
    x = torch.tensor([-1e4, -20.5, 0.0, 20.5, 1e4], dtype=torch.float64, requires_grad=True)
    y = safe_exp(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    np.testing.assert_allclose(y.detach().numpy(), np.exp([-20, -20, 0, 20, 20]), rtol=1e-12)
    assert gradient.tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_kl_in_the_reward_sums_the_log_ratio_over_trainable_tokens():
    old = np.array([-1.0, -2.0, np.nan, -1.0, -3.0])
    reference = np.array([-1.5, -1.0, np.inf, -2.0, -3.0])
    mask = np.array([True, True, False, True, True])
    found = kl_in_reward([1.0, 2.0, 3.0], old, reference, mask, [0, 3, 3, 5], coef=0.1)
    np.testing.assert_allclose(found, [1.0 - 0.1 * (0.5 - 1.0), 2.0, 3.0 - 0.1 * 1.0])
