"""The fused operators on a GPU: against logits in float64, in their use of memory, and against Transformer Engine."""

import importlib

import pytest
import torch

from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.kernels import PolicyLossOutput, linear_logprob, linear_policy_loss, policy_loss
from megatron_rl.kernels import token_loss as by_autograd
from tests.gpu.operands import PADDED, VOCABULARY, exact

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN = 384, 1024


def random_operands(dtype, tokens=TOKENS, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, device="cuda").to(dtype)
    weight = (0.1 * torch.randn(PADDED, HIDDEN, generator=generator, device="cuda")).to(dtype)
    target = torch.randint(0, VOCABULARY, (tokens,), generator=generator, device="cuda")
    target[::5] = -1
    temperature = 0.7 + torch.rand(tokens, generator=generator, device="cuda")
    return hidden, weight, target, temperature


def tensors_for(target, seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    old, advantages = torch.randn(2, len(target), generator=generator, device="cuda")
    return {"weights": (target >= 0) / len(target), "old_log_probs": old - 12, "advantages": advantages}


def smooth(rows, log_probs, entropy):
    """An objective without kinks: Σ sin(log p) + 0.1 H."""
    return PolicyLossOutput(
        (torch.sin(log_probs).double() + 0.1 * entropy.double()).sum(),
        torch.zeros_like(log_probs, dtype=torch.int8),
        torch.cos(log_probs),
        torch.full_like(entropy, 0.1),
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 1e-2)])
def test_the_fused_loss_and_its_gradients_are_those_of_naive_float64(dtype, tolerance):
    hidden, weight, target, temperature = random_operands(dtype)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found = linear_policy_loss(
        h,
        w,
        target,
        objective=smooth,
        temperature=temperature,
        vocab_size=VOCABULARY,
        chunk_tokens=100,
        with_entropy=True,
    )
    mine = torch.autograd.grad(found.loss, (h, w))
    h64, w64 = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_probs, entropy = exact(h64 @ w64.T, target, temperature)
    live = target >= 0
    wanted = (torch.sin(log_probs)[live] + 0.1 * entropy[live]).sum()
    torch.testing.assert_close(found.log_probs.double(), log_probs, rtol=1e-5, atol=5e-5)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-5, atol=5e-5)
    for one, true in zip(mine, torch.autograd.grad(wanted, (h64, w64)), strict=True):
        assert (one.double() - true).norm() <= tolerance * true.norm()


def test_the_gradient_of_the_weight_can_be_added_where_megatron_keeps_it():
    hidden, weight, target, temperature = random_operands(torch.bfloat16)
    options = {"temperature": temperature, "vocab_size": VOCABULARY, "chunk_tokens": 100, "with_entropy": True}
    w = weight.clone().requires_grad_()
    (apart,) = torch.autograd.grad(linear_policy_loss(hidden, w, target, objective=smooth, **options).loss, w)
    main_grad = torch.ones(PADDED, HIDDEN, device="cuda")
    linear_policy_loss(hidden, w, target, objective=smooth, main_grad=main_grad, **options)
    torch.testing.assert_close((main_grad - 1).to(torch.bfloat16), apart, rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_without_logits_are_those_of_the_logits(dtype):
    hidden, weight, target, temperature = random_operands(dtype)
    log_probs, entropy = linear_logprob(
        hidden, weight, target, temperature=temperature, vocab_size=VOCABULARY, with_entropy=True
    )
    wanted = exact(hidden.double() @ weight.double().T, target, temperature)
    torch.testing.assert_close(log_probs.double(), wanted[0], rtol=1e-5, atol=5e-5)
    torch.testing.assert_close(entropy.double(), wanted[1], rtol=1e-5, atol=5e-5)


def test_the_logits_of_one_chunk_exist_at_a_time():
    chunk, tokens = 512, 8192
    hidden, weight, target, _ = random_operands(torch.bfloat16, tokens)
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    spec, tensors = LossSpec(), tensors_for(target)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_policy_loss(
        h,
        w,
        target,
        objective=lambda rows, log_probs, _: policy_loss(
            log_probs, spec, **{name: values[rows] for name, values in tensors.items()}
        ),
        vocab_size=VOCABULARY,
        chunk_tokens=chunk,
    )
    logits, gradients = chunk * PADDED * 4, PADDED * HIDDEN * 4 + tokens * HIDDEN * 2
    # Beside them: one chunk's gradient where only a part of its rows acts, and numbers per token.
    assert torch.cuda.max_memory_allocated() - before < 1.6 * logits + 1.1 * gradients + (64 << 20)


@pytest.mark.parametrize("kind", ["ppo", "cispo", "nll"])
def test_the_closed_form_of_a_loss_is_what_autograd_makes_of_it(kind):
    _, _, target, _ = random_operands(torch.bfloat16)
    tensors = {**tensors_for(target), "reference_log_probs": -12 + torch.randn(TOKENS, device="cuda")}
    spec = LossSpec(kind=kind, kl_coef=0.1, entropy_coef=0.01, dual_clip=3.0 if kind == "ppo" else None)
    log_probs, entropy = -12 + torch.randn(TOKENS, device="cuda"), torch.rand(TOKENS, device="cuda")
    found = policy_loss(log_probs, spec, entropy=entropy, **tensors)
    wanted = by_autograd.token_loss(log_probs, spec, entropy=entropy, **tensors)
    assert torch.equal(found.flags, wanted.flags)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found.d_log_probs, wanted.d_log_probs, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.d_entropy, wanted.d_entropy, rtol=1e-6, atol=0)


@pytest.fixture
def transformer_engine():
    try:
        importlib.import_module("transformer_engine.pytorch.cross_entropy")
    except ImportError as error:
        pytest.skip(f"needs Transformer Engine ({error})")


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformer_engine_computes_the_same_log_probs_and_gradients(dtype):
    """Padding and temperatures included, of which Transformer Engine knows nothing by itself."""
    hidden, weight, target, temperature = random_operands(dtype)
    results = []
    for name in ("auto", "te"):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        found = linear_policy_loss(
            h,
            w,
            target,
            objective=lambda rows, log_probs, _: PolicyLossOutput(
                torch.sin(log_probs).double().sum(),
                torch.zeros_like(log_probs, dtype=torch.int8),
                torch.cos(log_probs),
                None,
            ),
            temperature=temperature,
            vocab_size=VOCABULARY,
            chunk_tokens=100,
            logprob_backend=name,
        )
        results.append((found, torch.autograd.grad(found.loss, (h, w))))
    (ours, our_gradients), (theirs, their_gradients) = results
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-3)
    for mine, other in zip(our_gradients, their_gradients, strict=True):
        assert (mine.double() - other.double()).norm() <= 1e-2 * mine.double().norm()
