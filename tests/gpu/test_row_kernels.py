"""The Triton kernels on a GPU at real sizes: against float64, in place, and again and again with the same bits."""

import pytest
import torch

from megatron_rl.kernels import backend, vocab_parallel_logprob
from tests.gpu.operands import PADDED, VOCABULARY, exact, live_rows, random_logits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_log_probs_entropy_and_gradient_are_those_of_float64(dtype):
    logits, target, temperature = random_logits(256, dtype)
    x, y = logits.clone().requires_grad_(), logits.clone().nan_to_num().double().requires_grad_()
    found = vocab_parallel_logprob(x, target, temperature=temperature, vocab_size=VOCABULARY, with_entropy=True)
    wanted = exact(y, target, temperature)
    for mine, true in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=1e-5)
    c, d = torch.randn(2, 256, device="cuda", dtype=torch.float64)
    (gradient,) = torch.autograd.grad((found[0] * c + found[1] * d).sum(), x)
    (reference,) = torch.autograd.grad((wanted[0] * c + wanted[1] * d).sum(), y)
    nearest = reference.float().to(dtype)
    torch.testing.assert_close(
        gradient, nearest, rtol={torch.float32: 2e-5, torch.float16: 2e-3}.get(dtype, 1e-2), atol=1e-6
    )
    if dtype == torch.bfloat16:  # rounded to nearest, not cut off: half of all would differ
        assert (gradient == nearest).double().mean() > 0.98
    assert torch.all(gradient[target < 0] == 0)
    assert torch.all(gradient[:, VOCABULARY:] == 0)


def gradients_of(logits, target, temperature):
    """A function of `out`, with random gradients of which some are 0."""
    rows = live_rows(logits, target, temperature)
    stats, _ = backend.vocab_statistics(rows, True, False)
    merged = backend.combine(stats[None], 0)
    grad, entropy_grad = torch.randn(2, len(rows.target), device="cuda")
    grad[::5] = entropy_grad[::5] = 0

    def run(rows, out):
        return backend.logits_gradient(
            rows,
            maximum=stats[0],
            log_norm=merged.log_norm,
            kept=None,
            grad=grad,
            entropy=merged.entropy,
            entropy_grad=entropy_grad,
            out=out,
        )

    return run, rows


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_narrow_gradient_over_its_own_wide_logits_never_meets_an_unread_one(narrow):
    """A race would show as a difference to the gradient written elsewhere; all processors are busy, many times."""
    logits, target, temperature = random_logits(2048, torch.float32)
    run, rows = gradients_of(logits, target, temperature)
    apart = run(rows, torch.empty(2048, PADDED, dtype=narrow, device="cuda"))
    for _ in range(20):
        copy = logits.clone()
        over = run(live_rows(copy, target, temperature), copy.view(narrow)[:, :PADDED])
        assert torch.equal(over, apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_in_the_place_of_its_logits_is_the_same(dtype):
    logits, target, temperature = random_logits(1024, dtype)
    run, rows = gradients_of(logits, target, temperature)
    apart = run(rows, torch.empty_like(logits))
    assert torch.equal(run(rows, logits), apart)


def test_results_are_equal_to_the_last_bit_every_time():
    logits, target, temperature = random_logits(1024, torch.bfloat16)
    rows = live_rows(logits, target, temperature)
    first, _ = backend.vocab_statistics(rows, True, False)
    for _ in range(10):
        again, _ = backend.vocab_statistics(rows, True, False)
        assert torch.equal(again, first)


@pytest.mark.parametrize("parts", [2, 8])
def test_slices_of_the_vocabulary_give_what_the_whole_gives(parts):
    logits, target, temperature = random_logits(128, torch.float32)
    rows = live_rows(logits, target, temperature)
    whole, _ = backend.vocab_statistics(rows, True, False)
    width, slices = PADDED // parts, []
    for part in range(parts):
        cut = logits[:, part * width : (part + 1) * width].contiguous()
        local = live_rows(cut, target, temperature)
        valid = min(width, max(0, VOCABULARY - part * width))
        sliced = type(rows)(cut, local.target - part * width, local.index, local.inverse_temperature, valid)
        slices.append(backend.vocab_statistics(sliced, True, False)[0])
    found, wanted = backend.combine(torch.stack(slices), parts - 1), backend.combine(whole[None], 0)
    torch.testing.assert_close(found.log_prob, wanted.log_prob, rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(found.entropy, wanted.entropy, rtol=1e-6, atol=4e-6)


def test_rows_may_lie_more_than_2_to_the_31_elements_away():
    tokens = (1 << 31) // PADDED + 2
    logits = torch.zeros(tokens, PADDED, dtype=torch.bfloat16, device="cuda")
    logits[-1, 7] = 9.0
    target = torch.full((tokens,), -1, device="cuda")
    target[-1] = 7
    found, _ = vocab_parallel_logprob(logits, target, vocab_size=VOCABULARY)
    wanted = logits[-1, :VOCABULARY].double().log_softmax(0)[7]
    torch.testing.assert_close(found[-1].double(), wanted, rtol=1e-5, atol=1e-5)
