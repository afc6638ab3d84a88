"""Log-probs and entropy of logits, and their gradient, against plain float64 autograd; one process, no sharding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.kernels import vocab_parallel_logprob, vocab_rows, vocab_statistics

SEEDS = st.integers(0, 2**32 - 1)
PROPERTY = settings(max_examples=25, deadline=None)


@pytest.fixture(params=["one block, kept", "many blocks, recomputed"])
def walk(request, monkeypatch):
    """Small tensors fit one block and are kept for backward; force the other way too."""
    if request.param == "many blocks, recomputed":
        monkeypatch.setitem(vocab_rows.BLOCK_ELEMENTS, "cpu", 64)
        monkeypatch.setattr(vocab_statistics, "KEPT_ELEMENTS", 0)


def reference(logits, target, temperature=1.0, vocab_size=None):
    """`(log_probs, entropy)` in float64 by autograd, masked rows 0."""
    live = target >= 0
    scaled = logits.double()[live][:, :vocab_size]
    scaled = scaled / (temperature.double()[live, None] if torch.is_tensor(temperature) else temperature)
    logp = scaled.log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)
    picked = logp.gather(1, target[live, None]).squeeze(1)
    zeros = torch.zeros(len(target), dtype=torch.float64)
    return zeros.masked_scatter(live, picked), zeros.masked_scatter(live, entropy)


def random_rows(seed, rows=13, width=21, spread=3.0, dtype=torch.float32, masked=0.0):
    generator = torch.Generator().manual_seed(seed)
    logits = (spread * torch.randn(rows, width, generator=generator)).to(dtype)
    target = torch.randint(0, width - 4, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < masked] = -1
    g, ge = torch.randn(2, rows, generator=generator)
    return logits, target, g, ge


def gradient(function, logits, g, ge=None):
    leaf = logits.detach().clone().requires_grad_()
    logp, entropy = function(leaf)
    loss = (logp * g).sum() if ge is None else (logp * g).sum() + (entropy * ge).sum()
    return torch.autograd.grad(loss, leaf)[0]


def check(logits, target, g, ge, rtol=2e-6, **options):
    """Values and gradients, with and without the entropy, relative to the largest one."""
    logp, entropy = vocab_parallel_logprob(logits, target, with_entropy=True, **options)
    wanted_logp, wanted_entropy = reference(logits, target, **options)
    torch.testing.assert_close(logp.double(), wanted_logp, rtol=rtol, atol=2e-6)
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=rtol, atol=2e-6)
    for with_entropy in (False, True):
        mine = gradient(
            lambda x, e=with_entropy: vocab_parallel_logprob(x, target, with_entropy=e, **options),
            logits,
            g,
            ge if with_entropy else None,
        )
        wanted = gradient(
            lambda x: reference(x, target, **options),
            logits.double(),
            g.double(),
            ge.double() if with_entropy else None,
        )
        assert mine.dtype == logits.dtype
        scale = max(1e-30, float(wanted.abs().max()))
        tolerance = 5e-3 if logits.dtype == torch.bfloat16 else 2e-6
        assert float((mine.double() - wanted).abs().max()) <= tolerance * scale


@given(seed=SEEDS)
@PROPERTY
def test_values_and_gradients_equal_float64_autograd(seed):
    check(*random_rows(seed, masked=0.3))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [0.0, 0.4])
@pytest.mark.parametrize("vocab_size", [None, 17])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.usefixtures("walk")
def test_every_path_equals_float64_autograd(seed, dtype, masked, vocab_size, scaled):
    logits, target, g, ge = random_rows(seed, dtype=dtype, masked=masked)
    temperature = torch.linspace(0.6, 1.4, len(target)) if scaled else 1.0
    check(logits, target, g, ge, temperature=temperature, vocab_size=vocab_size)


@pytest.mark.usefixtures("walk")
def test_the_gradient_is_the_derivative():
    logits, target, _, _ = random_rows(3, rows=4, width=7, dtype=torch.float64)
    temperature = torch.tensor([0.7, 1.0, 1.3, 2.0])
    torch.autograd.gradcheck(
        lambda x: vocab_parallel_logprob(x, target, temperature=temperature, vocab_size=6, with_entropy=True),
        logits.requires_grad_(),
    )


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.usefixtures("walk")
def test_masked_rows_are_inert_whatever_stands_in_them(garbage):
    logits, target, g, ge = random_rows(1, masked=0.4)
    dead = target < 0
    dirty = logits.masked_fill(dead[:, None], garbage).requires_grad_()
    logp, entropy = vocab_parallel_logprob(dirty, target, with_entropy=True)
    (found,) = torch.autograd.grad((logp * g + entropy * ge).sum(), dirty)
    clean = gradient(lambda x: vocab_parallel_logprob(x, target, with_entropy=True), logits, g, ge)
    assert torch.equal(found, clean)
    assert torch.all(found[dead] == 0)
    assert torch.all(logp[dead] == 0)
    assert torch.all(entropy[dead] == 0)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 50.0])
@pytest.mark.usefixtures("walk")
def test_padding_columns_are_excluded_and_get_no_gradient(garbage):
    logits, target, g, ge = random_rows(2)
    padded = logits.clone()
    padded[:, 17:] = garbage
    found = gradient(lambda x: vocab_parallel_logprob(x, target, vocab_size=17, with_entropy=True), padded, g, ge)
    alone = gradient(lambda x: vocab_parallel_logprob(x, target, with_entropy=True), logits[:, :17].contiguous(), g, ge)
    assert torch.equal(found[:, :17], alone)
    assert torch.all(found[:, 17:] == 0)


@pytest.mark.usefixtures("walk")
def test_minus_infinity_at_other_tokens_is_legal():
    logits, target, g, ge = random_rows(4)
    forbidden = (torch.arange(21) % 3 == 0)[None, :] & (torch.arange(21)[None, :] != target[:, None])
    check(logits.masked_fill(forbidden, -torch.inf), target, g, ge)


@pytest.mark.usefixtures("walk")
def test_peaked_and_far_shifted_logits_keep_their_precision():
    logits, target, g, ge = random_rows(5, spread=60.0)
    check(logits, target, g, ge)
    check((logits / 60.0).round(decimals=2) + 4096.0, target, g, ge)


def test_a_non_finite_logit_of_a_live_row_shows_in_its_log_prob():
    logits, target, _, _ = random_rows(6)
    for bad in (float("nan"), float("inf")):
        broken = logits.clone()
        broken[2, 3] = bad
        logp, entropy = vocab_parallel_logprob(broken, target, with_entropy=True)
        assert torch.isnan(logp[2])
        assert torch.isnan(entropy[2])
        assert torch.isfinite(torch.cat([logp[:2], logp[3:]])).all()


def test_one_number_and_equal_temperatures_per_token_agree():
    logits, target, _, _ = random_rows(7)
    results = [
        vocab_parallel_logprob(logits, target, temperature=t, with_entropy=True)[0]
        for t in (0.7, torch.full((13,), 0.7))
    ]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6)
    ones, plain = (vocab_parallel_logprob(logits, target, temperature=t)[0] for t in (torch.ones(13), 1.0))
    assert torch.equal(ones, plain)


def test_a_temperature_of_a_masked_row_is_not_read():
    logits, target, _, _ = random_rows(8, masked=0.5)
    temperature = torch.where(target < 0, float("nan"), 0.9)
    logp, _ = vocab_parallel_logprob(logits, target, temperature=temperature)
    assert torch.isfinite(logp).all()


def test_blocks_do_not_change_a_single_bit(monkeypatch):
    logits, target, g, ge = random_rows(9, masked=0.3)
    run = lambda x: vocab_parallel_logprob(x, target, temperature=0.8, with_entropy=True)  # noqa: E731
    whole = (*run(logits), gradient(run, logits, g, ge))
    monkeypatch.setitem(vocab_rows.BLOCK_ELEMENTS, "cpu", 64)
    monkeypatch.setattr(vocab_statistics, "KEPT_ELEMENTS", 0)
    for a, b in zip(whole, (*run(logits), gradient(run, logits, g, ge)), strict=True):
        assert torch.equal(a, b)


def test_an_unused_entropy_changes_no_gradient():
    logits, target, g, _ = random_rows(0)
    without = gradient(lambda x: vocab_parallel_logprob(x, target), logits, g)
    unused = gradient(lambda x: vocab_parallel_logprob(x, target, with_entropy=True), logits, g)
    torch.testing.assert_close(unused, without, rtol=0, atol=1e-7)


def test_an_entropy_alone_has_its_gradient():
    logits, target, _, ge = random_rows(1)
    mine = gradient(lambda x: vocab_parallel_logprob(x, target, with_entropy=True)[::-1], logits, ge)
    wanted = gradient(lambda x: reference(x, target)[::-1], logits.double(), ge.double())
    torch.testing.assert_close(mine.double(), wanted, rtol=1e-5, atol=1e-6)


def test_without_entropy_none_is_returned():
    logits, target, _, _ = random_rows(0)
    assert vocab_parallel_logprob(logits, target)[1] is None


@pytest.mark.parametrize("rows", [0, 3])
def test_no_live_row_gives_zeros_and_a_zero_gradient(rows):
    logits = torch.full((rows, 8), float("nan"), requires_grad=True)
    target = torch.full((rows,), -1)
    logp, entropy = vocab_parallel_logprob(logits, target, with_entropy=True)
    (found,) = torch.autograd.grad((logp + entropy).sum(), logits)
    assert torch.equal(logp, torch.zeros(rows))
    assert torch.equal(entropy, torch.zeros(rows))
    assert torch.equal(found, torch.zeros(rows, 8))


@pytest.mark.parametrize(("bad", "message"), [(17, r"target\[2\]=17.*0 \.\. 16"), (-2, r"target\[2\]=-2")])
def test_an_id_outside_the_vocabulary_is_refused_with_its_value(bad, message):
    logits, target, _, _ = random_rows(0)
    target[2] = bad
    with pytest.raises(ValueError, match=message):
        vocab_parallel_logprob(logits, target, vocab_size=17)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), 5e-324, torch.tensor([1.0] * 12 + [0.0])])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    logits, target, _, _ = random_rows(0)
    with pytest.raises(ValueError, match=r"greater than (0|2\.9e-39, to divide float32 by it)"):
        vocab_parallel_logprob(logits, target, temperature=temperature)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 22}, "vocab_size=22"),
        ({"temperature": torch.ones(5)}, r"temperature \(5,\)"),
        ({"target": torch.zeros(5, dtype=torch.long)}, r"target \(5,\)"),
    ],
)
def test_shapes_that_disagree_are_refused(options, message):
    logits, target, _, _ = random_rows(0)
    with pytest.raises(ValueError, match=message):
        vocab_parallel_logprob(logits, **({"target": target} | options))
