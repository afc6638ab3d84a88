"""Losses beyond PPO's: worked values, gradients by finite differences, and what no input may break."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.losses import FREE, HIGH, LOW, REJECTED, REJECTED_SEQUENCE, Sequences, policy_loss
from megatron_rl.algorithms.spec import LossSpec

KINDS = {
    "gspo": LossSpec("gspo", eps_low=0.3, eps_high=0.4),
    "gspo_token": LossSpec("gspo_token", eps_low=0.3, eps_high=0.4),
    "gmpo": LossSpec("gmpo", eps_low=0.3, eps_high=0.4),
    "opmd": LossSpec("opmd", args={"tau": 0.3}),
    "sapo": LossSpec("sapo"),
    "cispo": LossSpec("cispo", eps_low=1.0, eps_high=1.5),
    "ppo": LossSpec(dual_clip=3.0),
}
every_kind = pytest.mark.parametrize("spec", KINDS.values(), ids=KINDS)
LENGTHS = (3, 1, 4, 2)


def packed(spread: float = 0.2, seed: int = 0) -> dict[str, Any]:
    """Four sequences end to end, one weight and one advantage each, no ratio within 1e-3 of a bound."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    old = -0.2 - 2 * torch.rand(len(index), generator=generator, dtype=torch.float64)
    log_ratio = spread * torch.randn(len(index), generator=generator, dtype=torch.float64)
    weights = torch.tensor([1 / (n * len(LENGTHS)) for n in LENGTHS], dtype=torch.float64)
    return {
        "log_probs": old + log_ratio,
        "old_log_probs": old,
        "advantages": torch.tensor([1.3, -0.7, -1.1, 0.4], dtype=torch.float64)[index],
        "weights": weights[index],
        "behaviour_log_probs": old + 0.05,
        "sequences": Sequences(index, torch.tensor(LENGTHS, dtype=torch.float64)),
    }


def loss_and_gradient(tokens: dict[str, Any], spec: LossSpec) -> tuple[float, Tensor, list[int]]:
    log_probs = tokens["log_probs"].clone().requires_grad_()
    loss, flags = policy_loss(log_probs, spec, **{k: v for k, v in tokens.items() if k != "log_probs"})
    return loss.item(), torch.autograd.grad(loss, log_probs)[0], flags.tolist()


def two(log_ratios: list[list[float]], advantages: list[float]) -> dict[str, Any]:
    """Sequences of these log-ratios, old log-probs of -1, mean over tokens and then over sequences."""
    lengths = [len(ratios) for ratios in log_ratios]
    index = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)])
    flat = torch.tensor([r for ratios in log_ratios for r in ratios], dtype=torch.float64)
    return {
        "log_probs": flat - 1,
        "old_log_probs": torch.full_like(flat, -1),
        "advantages": torch.tensor(advantages, dtype=torch.float64)[index],
        "weights": torch.tensor([1 / (n * len(lengths)) for n in lengths], dtype=torch.float64)[index],
        "sequences": Sequences(index, torch.tensor(lengths, dtype=torch.float64)),
    }


def test_gspo_by_hand() -> None:
    """s = exp(mean): exp(0.1), free under 1.2; exp(-0.3) = 0.74, below 0.8 with A < 0, hence clipped."""
    tokens = two([[0.3, -0.1], [-0.2, -0.4, -0.3]], [1.0, -2.0])
    loss, gradient, flags = loss_and_gradient(tokens, LossSpec("gspo", eps_low=0.2, eps_high=0.2))
    s = math.exp(0.1)
    assert loss == pytest.approx(-s / 2 + 2 * 0.8 / 2)
    assert gradient.tolist() == pytest.approx([-s / 4, -s / 4, 0, 0, 0])
    assert flags == [FREE, FREE, LOW, LOW, LOW]


def test_the_gradient_of_gspo_keeps_to_accepted_tokens_and_its_ratio_to_all() -> None:
    """dL/dlogp = -weight A s with s over the mask before rejection: rejecting a token changes no other token."""
    tokens = two([[0.3, -0.1], [0.1]], [1.0, 1.0]) | {"behaviour_log_probs": torch.tensor([-1.0, -4.0, -1.0])}
    spec = LossSpec("gspo", eps_low=0.2, eps_high=0.2, correction="mis")
    loss, gradient, flags = loss_and_gradient(tokens, spec)
    s = math.exp(0.1)
    assert flags == [FREE, REJECTED, FREE]
    assert gradient.tolist() == pytest.approx([-s / 4, 0, -s / 2])
    assert loss == pytest.approx(-s / 4 - s / 2)


def test_gspo_token_takes_an_advantage_for_each_token() -> None:
    tokens = two([[0.3, -0.1]], [1.0]) | {"advantages": torch.tensor([2.0, -1.0], dtype=torch.float64)}
    _, gradient, _ = loss_and_gradient(tokens, LossSpec("gspo_token"))
    assert gradient.tolist() == pytest.approx([-2 * math.exp(0.1) / 2, math.exp(0.1) / 2])


def test_cispo_by_hand() -> None:
    """The capped weight does not take the gradient away, on either side of the advantage."""
    tokens = two([[math.log(8)], [math.log(0.5)], [math.log(8)]], [1.0, 1.0, -1.0])
    loss, gradient, flags = loss_and_gradient(tokens, LossSpec("cispo", eps_low=1.0, eps_high=4.0))
    assert flags == [HIGH, FREE, HIGH]
    assert gradient.tolist() == pytest.approx([-5 / 3, -0.5 / 3, 5 / 3])
    assert loss == pytest.approx(-0.5 / 3 * (math.log(0.5) - 1))


def test_sapo_by_hand() -> None:
    """At ratio 1 it is a policy gradient; far above, the gate is shut."""
    tokens = two([[0.0], [0.0], [math.log(30)]], [1.0, -1.0, 1.0])
    loss, gradient, _ = loss_and_gradient(tokens, LossSpec("sapo"))
    assert gradient[:2].tolist() == pytest.approx([-1 / 3, 1 / 3])
    assert abs(gradient[2]) < 1e-9
    assert loss == pytest.approx((-2 + 2 / 1.05 - 4) / 3)


def test_gmpo_by_hand() -> None:
    """Ratios 2 and 0.5 with A > 0: the first counts as 1.4; sqrt(1.4 * 0.5), and no gradient for the clipped token."""
    tokens = two([[math.log(2), math.log(0.5)]], [1.0])
    loss, gradient, flags = loss_and_gradient(tokens, KINDS["gmpo"])
    s = math.sqrt(1.4 * 0.5)
    assert (loss, flags) == (pytest.approx(-s), [HIGH, FREE])
    assert gradient.tolist() == pytest.approx([0, -s / 2])


def test_opmd_by_hand() -> None:
    """logp(y) = -2.2, old(y) = -2: -A logp(y) + (tau / 2) 0.04, divided by the two tokens."""
    loss, gradient, _ = loss_and_gradient(two([[0.1, -0.3]], [2.0]), LossSpec("opmd", args={"tau": 0.5}))
    assert loss == pytest.approx((2 * 2.2 + 0.25 * 0.04) / 2)
    assert gradient.tolist() == pytest.approx([(-2 + 0.5 * -0.2) / 2] * 2)


@pytest.mark.parametrize("spread", [0.2, 0.9])
@pytest.mark.parametrize("name", [name for name in KINDS if name != "cispo"])
def test_gradients_are_finite_differences_of_the_loss(name: str, spread: float) -> None:
    tokens = packed(spread)
    others = {k: v for k, v in tokens.items() if k != "log_probs"}
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(x, KINDS[name], **others)[0], tokens["log_probs"].requires_grad_()
    )


def test_the_gradient_of_cispo_is_that_of_its_frozen_weight() -> None:
    tokens = packed(0.9)
    _, gradient, _ = loss_and_gradient(tokens, KINDS["cispo"])
    ratio = (tokens["log_probs"] - tokens["old_log_probs"]).exp().clamp(0, 2.5)
    torch.testing.assert_close(gradient, -tokens["weights"] * ratio * tokens["advantages"])


@every_kind
@pytest.mark.parametrize("gap", [1e4, -1e4])
@pytest.mark.parametrize("sign", [1, -1])
def test_loss_and_gradient_are_finite_at_any_log_ratio(spec: LossSpec, gap: float, sign: float) -> None:
    tokens = packed()
    tokens["old_log_probs"] = tokens["log_probs"] - gap
    tokens["advantages"] = tokens["advantages"].abs() * sign
    loss, gradient, _ = loss_and_gradient(tokens, spec)
    assert math.isfinite(loss)
    assert torch.isfinite(gradient).all()
    if spec.kind not in ("cispo", "opmd"):  # these have no exponential in their gradient
        assert (gradient == 0).all()


def test_only_the_mean_of_a_sequence_is_clamped() -> None:
    """Terms of 30 and -29.8 are beyond the clamp, their mean is 0.1."""
    tokens = two([[30.0, -29.8]], [1.0])
    _, gradient, _ = loss_and_gradient(tokens, LossSpec("gspo"))
    assert gradient.tolist() == pytest.approx([-math.exp(0.1) / 2] * 2)


@every_kind
def test_an_all_masked_batch_has_loss_and_gradient_zero(spec: LossSpec) -> None:
    tokens = packed()
    tokens["weights"] = torch.zeros_like(tokens["weights"])
    tokens["sequences"] = Sequences(tokens["sequences"].index, torch.zeros(len(LENGTHS), dtype=torch.float64))
    loss, gradient, flags = loss_and_gradient(tokens, spec)
    assert loss == 0
    assert gradient.tolist() == [0.0] * sum(LENGTHS)
    assert flags == [FREE] * sum(LENGTHS)


@every_kind
def test_every_correction_weighs_or_rejects_and_nothing_else(spec: LossSpec) -> None:
    """Behaviour is 0.05 above old everywhere: rho = exp(-0.05)."""
    tokens, rho = packed(), math.exp(-0.05)
    plain, gradient, _ = loss_and_gradient(tokens, spec)
    for correction, bounds, factor in (("tis", (0, 2), rho), ("tis", (0, 0.5), 0.5), ("icepop", (0.5, 5), rho)):
        corrected = LossSpec(**vars(spec) | {"correction": correction, "correction_bounds": bounds})
        found, scaled, _ = loss_and_gradient(tokens, corrected)
        assert found == pytest.approx(factor * plain)
        torch.testing.assert_close(scaled, factor * gradient)
    for option in ({"correction": "mis", "correction_bounds": (0.97, 2)}, {"sequence_bounds": (0.97, 2)}):
        found, none, flags = loss_and_gradient(tokens, LossSpec(**vars(spec) | option))
        assert found == 0
        assert none.tolist() == [0.0] * sum(LENGTHS)
        assert set(flags) == {REJECTED if "correction" in option else REJECTED_SEQUENCE}


def test_a_loss_with_one_ratio_per_sequence_asks_for_the_sequences() -> None:
    tokens = packed()
    del tokens["sequences"]
    with pytest.raises(ValueError, match=r"loss=gspo .* pass `sequences`"):
        loss_and_gradient(tokens, KINDS["gspo"])
