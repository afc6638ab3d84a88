"""The public operators on top of the kernels: what they return, and which implementation `backend` gives them."""

import pytest
import torch

from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.kernels import linear_logprob, linear_policy_loss, policy_loss, triton, vocab_parallel_logprob

ROWS, HIDDEN, WIDTH, VOCABULARY = 19, 24, 80, 75
ALL = {"vocab_statistics", "combine", "logits_gradient", "linear_statistics", "token_loss"}


@pytest.fixture
def used(monkeypatch):
    """Names of the kernels that were launched."""
    names = set()

    def spied(name, function):
        def spy(*arguments, **options):
            names.add(name)
            return function(*arguments, **options)

        return spy

    for name in ALL:
        monkeypatch.setattr(triton, name, spied(name, getattr(triton, name)))
    return names


def random_batch(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    target[::4] = -1
    hidden, weight = torch.randn(ROWS, HIDDEN, generator=generator), torch.randn(WIDTH, HIDDEN, generator=generator)
    temperature = 0.6 + torch.rand(ROWS, generator=generator)
    old, advantages = torch.randn(2, ROWS, generator=generator)
    tensors = {"weights": (target >= 0) / ROWS, "old_log_probs": old - 4, "advantages": advantages}
    return hidden.to(dtype), (0.4 * weight).to(dtype), target, temperature, tensors


def run(operands, spec):
    """Loss, log-probs and gradients of the fused operator and of the one on logits, in one list."""
    hidden, weight, target, temperature, tensors = operands
    options = {"temperature": temperature, "vocab_size": VOCABULARY}
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    fused = linear_policy_loss(
        h,
        w,
        target,
        objective=lambda rows, log_probs, entropy: policy_loss(
            log_probs, spec, entropy=entropy, **{name: values[rows] for name, values in tensors.items()}
        ),
        with_entropy=True,
        chunk_tokens=8,
        **options,
    )
    x = (hidden @ weight.T).detach().requires_grad_()
    log_probs, entropy = vocab_parallel_logprob(x, target, with_entropy=True, **options)
    split = policy_loss(log_probs, spec, entropy=entropy, **tensors)
    alone, _ = linear_logprob(hidden, weight, target, **options)
    return [
        fused.loss,
        fused.log_probs,
        fused.entropy,
        *torch.autograd.grad(fused.loss, (h, w)),
        split.loss,
        *torch.autograd.grad(split.loss, x),
        alone,
    ]


def test_operators_agree_with_the_pytorch_path(used, monkeypatch):
    spec = LossSpec(entropy_coef=0.05, dual_clip=3.0)
    found = run(random_batch(), spec)
    assert used == ALL
    used.clear()
    monkeypatch.delenv("TRITON_INTERPRET")
    wanted = run(random_batch(torch.float64), spec)
    assert used == set()
    for mine, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), exact.double(), rtol=1e-5, atol=1e-5)


def test_gradient_checks_in_float64_are_left_to_pytorch(used):
    hidden, weight, target, _, _ = random_batch(torch.float64)
    vocab_parallel_logprob(hidden @ weight.T, target, vocab_size=VOCABULARY)
    assert used == set()


def test_a_loss_without_closed_form_is_differentiated_by_autograd(used):
    _, _, _, _, tensors = random_batch()
    policy_loss(torch.zeros(ROWS), LossSpec(kind="sapo"), **tensors)
    assert used == set()
    policy_loss(torch.zeros(ROWS), LossSpec(), **tensors)
    assert used == {"token_loss"}
