"""The closed form of the token losses against autograd over `algorithms.losses`, itself tested against the formulas."""

import itertools

import pytest
import torch

from megatron_rl.algorithms.losses import Sequences
from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.kernels import token_loss as by_autograd
from megatron_rl.kernels.triton import KINDS, token_loss

T, LENGTH = 40, 8
LOG_RATIOS = torch.tensor([0.0, 0.1, -0.1, 0.5, -0.5, 1.5, -1.5, 25.0, -25.0, 1e4, -1e4, 0.3, -0.3])
ADVANTAGES = torch.tensor([1.0, -1.0, 0.7, -0.3, 0.0])
KL = (None, ("k2", False), ("k2", True), ("k3", False), ("k3", True))
CORRECTIONS = (
    {},
    {"correction": "tis"},
    {"correction": "icepop"},
    {"correction": "mis", "sequence_bounds": (0.7, 1.4)},
    {"sequence_bounds": (0.7, 1.4)},
)


def random_tensors(seed=0, extreme=True, dtype=torch.float64):
    """Log-probs and the keywords of the loss; NaN wherever nothing is trainable."""
    generator = torch.Generator().manual_seed(seed)
    pick = lambda values: values[torch.randint(0, len(values), (T,), generator=generator)].double()  # noqa: E731
    noise = lambda: torch.randn(T, generator=generator, dtype=torch.float64)  # noqa: E731
    log_probs = (-noise().abs() - 1).to(dtype)
    index = torch.arange(T) // LENGTH
    trainable = torch.rand(T, generator=generator) > 0.2
    weights = torch.rand(T, generator=generator) * trainable
    weights[3] = 0.0
    ratios = pick(LOG_RATIOS if extreme else LOG_RATIOS[:7]).where(index > 1, 0.1 * noise())
    tensors = {
        "weights": weights,
        "old_log_probs": log_probs - ratios,
        "advantages": pick(ADVANTAGES),
        "behaviour_log_probs": log_probs - ratios - 0.6 * noise(),
        "reference_log_probs": log_probs + pick(LOG_RATIOS if extreme else LOG_RATIOS[:7]),
        "entropy": noise().abs().to(dtype),
    }
    log_probs[~trainable] = torch.nan
    for values in tensors.values():
        if values is not weights:
            values[~trainable] = torch.nan
    counts = torch.zeros(T // LENGTH, dtype=torch.float64).index_add_(0, index, trainable.double())
    return log_probs, {**tensors, "trainable": trainable, "sequences": Sequences(index, counts)}


def agree(found, wanted, rtol=1e-12):
    assert torch.equal(found.flags, wanted.flags)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=rtol, atol=1e-12)
    torch.testing.assert_close(found.d_log_probs, wanted.d_log_probs, rtol=rtol, atol=1e-13)
    assert (found.d_entropy is None) == (wanted.d_entropy is None)
    if wanted.d_entropy is not None:
        torch.testing.assert_close(found.d_entropy, wanted.d_entropy, rtol=rtol, atol=0)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_closed_form_is_the_gradient(kind, correction):
    duals = (None, 3.0) if kind == "ppo" else (None,)
    for seed, (dual, kl, entropy_coef) in enumerate(itertools.product(duals, KL, (0.0, 0.02))):
        estimator, unbiased = kl or ("k3", True)
        spec = LossSpec(
            kind=kind,
            dual_clip=dual,
            kl_coef=0.3 if kl else 0.0,
            kl_estimator=estimator,
            kl_unbiased=unbiased,
            entropy_coef=entropy_coef,
            **correction,
        )
        log_probs, tensors = random_tensors(seed)
        found, wanted = token_loss(log_probs, spec, **tensors), by_autograd.token_loss(log_probs, spec, **tensors)
        agree(found, wanted)
        dead = tensors["weights"] == 0
        assert torch.all(found.d_log_probs[dead] == 0)


@pytest.mark.parametrize("kind", ["ppo", "cispo", "gspo"])
@pytest.mark.parametrize("eps", [(0.2, 0.28), (1.0, 4.0), (0.05, 0.05)])
@pytest.mark.usefixtures("order")
def test_every_clip_bound_is_honoured(kind, eps):
    spec = LossSpec(kind=kind, eps_low=eps[0], eps_high=eps[1])
    log_probs, tensors = random_tensors(11, extreme=False)
    agree(token_loss(log_probs, spec, **tensors), by_autograd.token_loss(log_probs, spec, **tensors))


@pytest.mark.parametrize("kind", ["ppo", "gspo_token", "cispo"])
def test_without_old_log_probs_every_ratio_is_one(kind):
    spec = LossSpec(kind=kind, kl_coef=0.1)
    log_probs, tensors = random_tensors(2)
    tensors["old_log_probs"] = None
    agree(token_loss(log_probs, spec, **tensors), by_autograd.token_loss(log_probs, spec, **tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_come_in_the_precision_of_what_they_belong_to(dtype):
    spec = LossSpec(entropy_coef=0.1, kl_coef=0.1)
    log_probs, tensors = random_tensors(3, extreme=False)
    log_probs, tensors["entropy"] = log_probs.float(), tensors["entropy"].to(dtype)
    found, wanted = token_loss(log_probs, spec, **tensors), by_autograd.token_loss(log_probs, spec, **tensors)
    assert found.loss.dtype == torch.float64
    assert found.d_log_probs.dtype == torch.float32
    assert found.d_entropy.dtype == dtype
    torch.testing.assert_close(found.d_log_probs, wanted.d_log_probs, rtol=1e-6, atol=1e-9)


def test_a_trainable_log_prob_that_is_not_a_number_shows_in_the_loss():
    log_probs, tensors = random_tensors(4)
    bad = int((tensors["weights"] != 0).nonzero()[0])
    log_probs[bad] = torch.nan
    for kind in KINDS:
        assert torch.isnan(token_loss(log_probs, LossSpec(kind=kind), **tensors).loss), kind


def test_no_tokens_lose_nothing():
    none = torch.empty(0)
    found = token_loss(none, LossSpec(), weights=none, advantages=none)
    assert found.loss.item() == 0.0
    assert found.d_log_probs.shape == found.flags.shape == (0,)
