"""The loss of one micro-batch: worked values, and what is refused; `test_loss_invariance` compares it with formulas."""

import math

import numpy as np
import pytest
import torch

from megatron_rl.algorithms.losses import DUAL, FREE, HIGH, LOSSES, LOW, Loss, policy_loss
from megatron_rl.algorithms.spec import LossSpec

SPECS = {
    "dapo": LossSpec(),
    "grpo with k3": LossSpec(eps_high=0.2, kl_coef=0.04, kl_unbiased=False),
    "unbiased k3, entropy": LossSpec(kl_coef=0.5, entropy_coef=0.03),
    "unbiased k2, dual clip": LossSpec(kl_coef=0.3, kl_estimator="k2", dual_clip=1.5),
    "nll": LossSpec(kind="nll"),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def random_tokens(seed, size=24, masked=0.25):
    """Arrays of `policy_loss` in float64; ratios keep away from clip bounds, where gradients are not defined."""
    rng = np.random.default_rng(seed)
    ratio = rng.uniform(0.4, 2.2, size)
    for bound in (0.8, 1.2, 1.28, 1.5):
        ratio = np.where(np.abs(ratio - bound) < 2e-3, bound + 4e-3, ratio)
    logp = rng.uniform(-4.0, -0.1, size)
    arrays = {
        "log_probs": logp,
        "old_log_probs": logp - np.log(ratio),
        "advantages": rng.normal(size=size) + 0.1,
        "weights": np.where(rng.random(size) < masked, 0.0, rng.uniform(0.1, 1.0, size)),
        "reference_log_probs": logp + rng.normal(size=size),
        "entropy": rng.uniform(0.0, 3.0, size),
    }
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in arrays.items()}


def loss_and_gradients(tokens, spec):
    logp = tokens["log_probs"].clone().requires_grad_()
    entropy = tokens["entropy"].clone().requires_grad_()
    others = {k: v for k, v in tokens.items() if k not in ("log_probs", "entropy")}
    loss, flags = policy_loss(logp, spec, entropy=entropy, **others)
    gradients = torch.autograd.grad(loss, (logp, entropy), allow_unused=True)
    return loss.detach(), [torch.zeros_like(logp) if g is None else g for g in gradients], flags


@pytest.mark.parametrize("name", [name for name in SPECS if "k2" not in name])
def test_gradients_are_the_derivatives_of_the_loss(name):
    # Not k2: its importance ratio is detached on purpose, so its gradient is not the derivative of its value.
    tokens = random_tokens(seed=3)
    others = {k: v for k, v in tokens.items() if k not in ("log_probs", "entropy")}
    torch.autograd.gradcheck(
        lambda logp, entropy: policy_loss(logp, SPECS[name], entropy=entropy, **others)[0],
        (tokens["log_probs"].requires_grad_(), tokens["entropy"].requires_grad_()),
    )


def test_nll_is_the_negative_log_likelihood():
    tokens = random_tokens(seed=4)
    loss, (gradient, _), flags = loss_and_gradients(tokens, SPECS["nll"])
    torch.testing.assert_close(loss, -(tokens["weights"] * tokens["log_probs"]).sum())
    assert torch.equal(gradient, -tokens["weights"])
    assert torch.all(flags == FREE)


@every_spec
def test_an_all_masked_batch_has_loss_and_gradient_zero(spec):
    tokens = {k: torch.full((5,), float("nan"), dtype=torch.float64) for k in random_tokens(0)}
    tokens["weights"] = torch.zeros(5, dtype=torch.float64)
    loss, gradients, flags = loss_and_gradients(tokens, spec)
    assert float(loss) == 0.0
    assert all(torch.equal(g, torch.zeros(5, dtype=torch.float64)) for g in gradients)
    assert torch.all(flags == FREE)


@every_spec
@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
def test_loss_and_gradient_are_finite_at_any_log_ratio(spec, log_ratio):
    tokens = random_tokens(seed=1, masked=0.0)
    tokens["old_log_probs"] = tokens["log_probs"] - log_ratio
    tokens["reference_log_probs"] = tokens["log_probs"] + log_ratio
    loss, gradients, _ = loss_and_gradients(tokens, spec)
    assert torch.isfinite(loss)
    assert all(torch.isfinite(g).all() for g in gradients)


def test_the_gradient_is_zero_where_the_clamp_of_the_exponent_binds():
    tokens = random_tokens(seed=1, masked=0.0)
    tokens["old_log_probs"] = tokens["log_probs"] - 20.5
    tokens["advantages"] = -torch.ones(24, dtype=torch.float64)  # unclipped: the ratio of a negative advantage rises
    _, (gradient, _), _ = loss_and_gradients(tokens, SPECS["dapo"])
    assert torch.all(gradient == 0)


def one_token(ratio, advantage, spec):
    logp = torch.tensor([-2.0], dtype=torch.float64, requires_grad=True)
    loss, flags = policy_loss(
        logp,
        spec,
        old_log_probs=torch.tensor([-2.0 - math.log(ratio)], dtype=torch.float64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        weights=torch.ones(1, dtype=torch.float64),
    )
    (gradient,) = torch.autograd.grad(loss, logp)
    return float(loss.detach()), float(gradient), int(flags)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "flag"),
    [
        (1.0, 2.0, -2.0, -2.0, FREE),
        (1.27, 1.0, -1.27, -1.27, FREE),
        (1.5, 1.0, -1.28, 0.0, HIGH),
        (0.5, 1.0, -0.5, -0.5, FREE),  # a positive advantage has no lower bound
        (0.5, -1.0, 0.8, 0.0, LOW),
        (0.85, -1.0, 0.85, 0.85, FREE),
        (2.5, -1.0, 2.5, 2.5, FREE),
        (3.5, -1.0, 3.0, 0.0, DUAL),
        (3.5, 0.0, 0.0, 0.0, FREE),
    ],
)
def test_clip_higher_and_dual_clip_token_by_token(ratio, advantage, loss, gradient, flag):
    found = one_token(ratio, advantage, LossSpec(eps_low=0.2, eps_high=0.28, dual_clip=3.0))
    assert found == (pytest.approx(loss), pytest.approx(gradient), flag)


def test_without_dual_clip_a_large_ratio_of_a_negative_advantage_is_free():
    assert one_token(50.0, -1.0, LossSpec()) == (pytest.approx(50.0), pytest.approx(50.0), FREE)


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_is_the_policy_gradient():
    tokens = random_tokens(seed=5)
    logp = tokens["log_probs"].clone().requires_grad_()
    loss, flags = policy_loss(logp, LossSpec(), advantages=tokens["advantages"], weights=tokens["weights"])
    (gradient,) = torch.autograd.grad(loss, logp)
    torch.testing.assert_close(gradient, -tokens["weights"] * tokens["advantages"])
    torch.testing.assert_close(loss.detach(), -(tokens["weights"] * tokens["advantages"]).sum())
    assert torch.all(flags == FREE)


def test_float32_inputs_get_float32_gradients_and_a_float64_loss():
    tokens = {k: v.float() for k, v in random_tokens(seed=7).items()}
    loss, (gradient, _), flags = loss_and_gradients(tokens, LossSpec())
    assert (loss.dtype, gradient.dtype, flags.dtype) == (torch.float64, torch.float32, torch.int8)


def test_an_entropy_without_a_coefficient_stays_out_of_the_graph():
    tokens = random_tokens(seed=2)
    entropy = tokens["entropy"].requires_grad_()
    loss, _ = policy_loss(
        tokens["log_probs"].requires_grad_(),
        LossSpec(),
        advantages=tokens["advantages"],
        weights=tokens["weights"],
        entropy=entropy,
    )
    assert torch.autograd.grad(loss, entropy, allow_unused=True) == (None,)


@pytest.mark.parametrize(
    ("spec", "missing"),
    [
        (LossSpec(), "advantages"),
        (LossSpec(kl_coef=0.1), "reference_log_probs"),
        (LossSpec(entropy_coef=0.1), "entropy"),
    ],
)
def test_a_missing_tensor_is_named(spec, missing):
    tokens = random_tokens(seed=0)
    del tokens[missing]
    with pytest.raises(ValueError, match=missing):
        policy_loss(tokens.pop("log_probs"), spec, **tokens)


def test_a_tensor_of_another_shape_is_named():
    tokens = random_tokens(seed=0)
    tokens["advantages"] = tokens["advantages"][:-1]
    with pytest.raises(ValueError, match=r"advantages \(23,\).*\(24,\)"):
        policy_loss(tokens.pop("log_probs"), LossSpec(), **tokens)


def test_an_unknown_loss_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"loss='pppo'.*did you mean 'ppo'.*nll, opmd, ppo"):
        policy_loss(torch.zeros(1), LossSpec(kind="pppo"), weights=torch.ones(1))


def test_a_loss_is_added_by_one_line_in_the_registry(monkeypatch):
    def reinforce(inputs, spec):
        return -inputs.log_probs * inputs.require_advantages("reinforce"), torch.zeros(24, dtype=torch.int8)

    monkeypatch.setitem(LOSSES, "reinforce", Loss(reinforce))
    tokens = random_tokens(seed=9)
    loss, _ = policy_loss(tokens.pop("log_probs"), LossSpec(kind="reinforce"), **tokens)
    assert math.isfinite(float(loss))


def test_a_spec_is_read_from_the_config_section():
    from megatron_rl.config.algorithm import AlgorithmConfig

    spec = LossSpec.from_config(AlgorithmConfig(preset="grpo", dual_clip=3.0, entropy_coef=0.01))
    assert spec == LossSpec(eps_low=0.2, eps_high=0.2, dual_clip=3.0, kl_coef=0.04, entropy_coef=0.01)
