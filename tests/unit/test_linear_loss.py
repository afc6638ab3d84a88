"""The fused linear loss against float64 autograd through full logits; one process, no sharding, a loss in plain torch.

What a loss makes of log-probs is tested in test_losses.py; here it is any smooth function of them and of the entropy.
"""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.losses import Sequences
from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.kernels import PolicyLossOutput, linear_logprob, linear_policy_loss, matmul, policy_loss

NAN = float("nan")


@dataclasses.dataclass
class Case:
    """T rows of several sequences, some masked; the weight is padded beyond the vocabulary."""

    hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    temperature: torch.Tensor
    coefficients: torch.Tensor
    starts: list[int]
    vocab: int

    def options(self):
        return {"temperature": self.temperature, "vocab_size": self.vocab}


def make_case(seed=0, rows=37, masked=0.3, dtype=torch.float64, hidden=12, vocab=23, padding=5):
    generator = torch.Generator().manual_seed(seed)
    random = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)  # noqa: E731
    target = torch.randint(0, vocab, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < masked] = -1
    cuts = sorted({0, *torch.randint(1, max(2, rows), (4,), generator=generator).tolist()} - set(range(rows, rows + 2)))
    return Case(
        hidden=random(rows, hidden).to(dtype),
        weight=random(vocab + padding, hidden).to(dtype),
        target=target,
        temperature=torch.rand(rows, generator=generator) + 0.5,
        coefficients=random(2, rows),
        starts=cuts if rows else [0],
        vocab=vocab,
    )


def objective_of(case, with_entropy=True, seen=None):
    """Σ a sin(log_prob) + b H: its gradient depends on the log-probs, as that of a policy loss does."""
    a, b = case.coefficients

    def objective(rows, log_probs, entropy):
        if seen is not None:
            seen.append(rows.tolist())
        loss = (a[rows] * log_probs.double().sin()).sum()
        d_log_probs = (a[rows] * log_probs.double().cos()).to(log_probs.dtype)
        if entropy is None or not with_entropy:
            return PolicyLossOutput(loss, torch.ones(len(rows), dtype=torch.int8), d_log_probs, None)
        loss = loss + (b[rows] * entropy).sum()
        return PolicyLossOutput(loss, torch.ones(len(rows), dtype=torch.int8), d_log_probs, b[rows].to(entropy.dtype))

    return objective


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    log_probs: torch.Tensor
    entropy: torch.Tensor
    d_hidden: torch.Tensor
    d_weight: torch.Tensor


def naive(case, with_entropy=True, scale=1.0):
    """Full logits of the live rows, in float64 by autograd."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (case.hidden, case.weight))
    live = case.target >= 0
    logits = hidden[live] @ weight[: case.vocab].t() / case.temperature[live, None].double()
    scores = logits.log_softmax(1)
    log_probs = scores.gather(1, case.target[live, None]).squeeze(1)
    entropy = -(scores.exp() * scores).sum(1)
    a, b = case.coefficients[:, live]
    loss = (a * log_probs.sin()).sum() + ((b * entropy).sum() if with_entropy else 0.0)
    gradients = torch.autograd.grad(loss * scale, (hidden, weight))
    zeros = torch.zeros(len(live), dtype=torch.float64)
    spread = [zeros.masked_scatter(live, x.detach()) for x in (log_probs, entropy)]
    return Result(loss.detach(), *spread, *gradients)


def fused(case, with_entropy=True, scale=1.0, objective=None, **options):
    hidden, weight = (x.detach().requires_grad_() for x in (case.hidden, case.weight))
    objective = objective or objective_of(case, with_entropy)
    found = linear_policy_loss(
        hidden,
        weight,
        case.target,
        objective=objective,
        with_entropy=with_entropy,
        **{**case.options(), **options},
    )
    gradients = torch.autograd.grad(found.loss * scale, (hidden, weight))
    return Result(found.loss.detach(), found.log_probs, found.entropy, *gradients)


def assert_equal(found, wanted, tolerance):
    for name in ("loss", "log_probs", "entropy", "d_hidden", "d_weight"):
        mine, theirs = getattr(found, name), getattr(wanted, name)
        if mine is not None:
            scale = max(1e-3, float(theirs.abs().max())) if theirs.numel() else 1.0
            assert float((mine.double() - theirs).abs().max() if mine.numel() else 0.0) <= tolerance * scale, name


TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 1e-2}
whole_sequences = pytest.mark.parametrize("whole", [False, True], ids=["any cut", "whole sequences"])


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 40), chunk=st.integers(1, 45), whole=st.booleans())
@settings(max_examples=30, deadline=None)
def test_it_is_float64_autograd_for_every_cut(seed, rows, chunk, whole):
    case = make_case(seed, rows)
    found = fused(case, chunk_tokens=chunk, sequence_starts=case.starts if whole else None)
    assert_equal(found, naive(case), TOLERANCE[torch.float64])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("masked", [0.0, 0.5])
@whole_sequences
def test_every_dtype_and_form_equals_float64_autograd(dtype, with_entropy, masked, whole):
    case = make_case(1, masked=masked, dtype=dtype)
    found = fused(case, with_entropy, chunk_tokens=8, sequence_starts=case.starts if whole else None)
    assert_equal(found, naive(case, with_entropy), TOLERANCE[dtype])
    assert found.d_hidden.dtype == dtype
    assert found.d_weight.dtype == dtype


@pytest.mark.parametrize("widened", [4, 4096])
def test_logits_of_bf16_operands_are_not_rounded(widened, monkeypatch):
    """Sums of bf16 products in float32: the log-probs are those of exact arithmetic on the rounded operands."""
    monkeypatch.setattr(matmul, "WIDENED_ROWS", widened)
    case = make_case(2, dtype=torch.bfloat16, hidden=64)
    found, wanted = fused(case), naive(case)
    assert float((found.log_probs - wanted.log_probs).abs().max()) < 1e-5
    assert_equal(found, wanted, TOLERANCE[torch.bfloat16])


@whole_sequences
def test_chunks_change_results_by_rounding_only(whole):
    case = make_case(3, dtype=torch.float32)
    first = fused(case, chunk_tokens=1000)
    for chunk in (1, 3, 10):
        found = fused(case, chunk_tokens=chunk, sequence_starts=case.starts if whole else None)
        torch.testing.assert_close(found.log_probs, first.log_probs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.d_weight, first.d_weight, rtol=1e-4, atol=1e-5)


def test_the_objective_sees_every_live_row_once_in_order():
    case, seen = make_case(4), []
    fused(case, objective=objective_of(case, seen=seen), chunk_tokens=6)
    assert [row for rows in seen for row in rows] == (case.target >= 0).nonzero().squeeze(1).tolist()
    assert all(len(rows) <= 6 for rows in seen)


def test_sequences_are_never_cut_for_an_objective_that_needs_them():
    case, seen = make_case(5), []
    fused(case, objective=objective_of(case, seen=seen), chunk_tokens=6, sequence_starts=case.starts)
    edges = [*case.starts, len(case.target)]
    for start, end in itertools.pairwise(edges):
        live = [row for row in range(start, end) if case.target[row] >= 0]
        assert not live or any(set(live) <= set(rows) for rows in seen)
    assert max(len(rows) for rows in seen) > 6  # one sequence is longer than a chunk: two passes
    assert len(seen) > 1


def test_equal_cuts_do_not_depend_on_what_is_masked():
    """Ranks with parts of the same sequences call the objective equally often: it sums over ranks."""
    calls = []
    for masked in (0.0, 0.5, 1.0):
        case, seen = make_case(6, masked=masked), []
        options = {"chunk_tokens": 10, "sequence_starts": [0, 9, 20, 33], "equal_cuts": True}
        found = fused(case, objective=objective_of(case, seen=seen), **options)
        assert_equal(found, naive(case), TOLERANCE[torch.float64])
        calls.append(len(seen))
    assert calls == [4, 4, 4]


@pytest.mark.parametrize("garbage", [NAN, float("inf"), float("-inf")])
@whole_sequences
def test_masked_rows_and_padding_are_inert_whatever_stands_in_them(garbage, whole):
    case = make_case(7)
    options = {"chunk_tokens": 8, "sequence_starts": case.starts if whole else None}
    clean, dead = fused(case, **options), case.target < 0
    dirty = dataclasses.replace(case, hidden=case.hidden.clone(), weight=case.weight.clone())
    dirty.hidden[dead] = garbage
    dirty.weight[case.vocab :] = garbage
    found = fused(dirty, **options)
    for name in ("loss", "log_probs", "entropy", "d_hidden", "d_weight"):
        assert torch.equal(getattr(found, name), getattr(clean, name)), name
    assert torch.all(found.d_hidden[dead] == 0)
    assert torch.all(found.d_weight[case.vocab :] == 0)


@pytest.mark.parametrize("share", [0.3, 0.9, 1.0])
def test_rows_without_a_gradient_cost_and_change_nothing(share, monkeypatch):
    """Their products are left out once they are half of a chunk."""
    case, rows = make_case(8), []
    idle = torch.rand(len(case.target), generator=torch.Generator().manual_seed(0)) < share
    case.coefficients[:, idle] = 0.0
    from megatron_rl.kernels import linear_pass

    product = linear_pass.hidden_gradient
    monkeypatch.setattr(linear_pass, "hidden_gradient", lambda d, weight: rows.append(len(d)) or product(d, weight))
    found = fused(case)
    assert_equal(found, naive(case), TOLERANCE[torch.float64])
    assert torch.all(found.d_hidden[idle] == 0)
    acting = int(((case.target >= 0) & ~idle).sum())
    assert rows == {0.3: [int((case.target >= 0).sum())], 0.9: [acting], 1.0: []}[share]


@pytest.mark.parametrize("scale", [3.0, -0.5, 1.0])
def test_gradients_scale_with_the_incoming_one(scale):
    case = make_case(9)
    assert_equal(fused(case, scale=scale), naive(case, scale=scale), TOLERANCE[torch.float64])


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("starts", [None, [0]])
def test_nothing_to_train_on_gives_loss_and_gradients_of_zero(rows, starts):
    case = make_case(10, rows=rows, masked=1.1)
    found = fused(case, sequence_starts=starts)
    assert float(found.loss) == 0.0
    for values in (found.log_probs, found.entropy, found.d_hidden, found.d_weight):
        assert torch.all(values == 0)


def test_a_single_token():
    case = make_case(11, rows=1, masked=0.0)
    assert_equal(fused(case), naive(case), TOLERANCE[torch.float64])


def test_non_finite_hidden_states_show_and_stay_in_their_row():
    case = make_case(12, masked=0.0, dtype=torch.float32)
    case.hidden[5, 2] = NAN
    found = fused(case, chunk_tokens=10)
    assert torch.isnan(found.log_probs[5])
    assert torch.isnan(found.d_hidden[5]).any()
    others = torch.arange(len(case.target)) != 5
    assert torch.isfinite(found.log_probs[others]).all()
    assert torch.isfinite(found.d_hidden[others]).all()


def test_the_weight_gradient_is_added_to_a_given_buffer():
    case = make_case(13, dtype=torch.bfloat16)
    hidden, weight = (x.detach().requires_grad_() for x in (case.hidden, case.weight))
    main_grad = torch.ones(weight.shape)
    for _ in range(2):
        found = linear_policy_loss(
            hidden,
            weight,
            case.target,
            objective=objective_of(case, False),
            main_grad=main_grad,
            chunk_tokens=9,
            **case.options(),
        )
        found.loss.backward()
    assert weight.grad is None
    wanted = naive(case, False)
    assert float((main_grad - 1 - 2 * wanted.d_weight).abs().max()) <= 2e-5 * float(wanted.d_weight.abs().max())
    assert_equal(Result(*[None] * 3, hidden.grad / 2, None), wanted, TOLERANCE[torch.bfloat16])


def test_a_gradient_other_than_one_cannot_go_unseen_with_a_given_buffer():
    case = make_case(14)
    hidden = case.hidden.detach().requires_grad_()
    weight = case.weight.detach().requires_grad_()
    options = {"objective": objective_of(case, False), "main_grad": torch.zeros_like(weight), **case.options()}
    found = linear_policy_loss(hidden, weight, case.target, **options)
    (found.loss * 2).backward()
    assert torch.isnan(hidden.grad).all()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient_and_the_other_its_own(frozen):
    case = make_case(15)
    sides = {name: getattr(case, name).detach().requires_grad_(name != frozen) for name in ("hidden", "weight")}
    found = linear_policy_loss(*sides.values(), case.target, objective=objective_of(case, False), **case.options())
    found.loss.backward()
    free = next(name for name in sides if name != frozen)
    assert sides[frozen].grad is None
    torch.testing.assert_close(sides[free].grad, getattr(naive(case, False), f"d_{free}"), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("chunk", [3, 100])
def test_log_probs_alone_are_those_of_the_loss(dtype, with_entropy, chunk):
    case = make_case(16, dtype=dtype)
    case.hidden[case.target < 0] = NAN
    log_probs, entropy = linear_logprob(
        case.hidden, case.weight, case.target, with_entropy=with_entropy, chunk_tokens=chunk, **case.options()
    )
    wanted = naive(dataclasses.replace(case, hidden=case.hidden.nan_to_num()))
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    assert float((log_probs - wanted.log_probs).abs().max()) <= tolerance
    assert (entropy is None) == (not with_entropy)
    if entropy is not None:
        assert float((entropy - wanted.entropy).abs().max()) <= tolerance


def test_a_whole_sequence_ratio_does_not_depend_on_the_chunk():
    """GSPO through the operator: one clipped and one unclipped sequence, cut into pieces or not."""
    case = make_case(17, masked=0.2)
    starts = [0, 20]
    index = (torch.arange(len(case.target)) >= 20).long()
    live = case.target >= 0
    lengths = torch.zeros(2, dtype=torch.float64).index_add_(0, index, live.double())
    old = naive(case).log_probs - torch.where(index == 0, 0.05, 0.001)
    spec = LossSpec(kind="gspo", eps_low=0.01, eps_high=0.01)
    advantages = torch.where(index == 0, 1.0, -1.0)

    def objective(rows, log_probs, _):
        return policy_loss(
            log_probs,
            spec,
            weights=torch.full((len(rows),), 0.1),
            old_log_probs=old[rows],
            advantages=advantages[rows],
            sequences=Sequences(index[rows], lengths),
        )

    results = [
        fused(case, False, objective=objective, chunk_tokens=chunk, sequence_starts=starts) for chunk in (100, 6)
    ]
    assert_equal(results[1], results[0], 1e-12)
    clipped = index == 0
    assert torch.all(results[0].d_hidden[clipped] == 0)
    assert torch.all(results[0].d_hidden[~clipped & live] != 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.full((37,), 23)}, r"target\[0\]=23 is outside the vocabulary: ids are 0 \.\. 22"),
        ({"target": torch.full((37,), -2)}, r"target\[0\]=-2"),
        ({"target": torch.zeros(36, dtype=torch.long)}, r"hidden \(37, 12\) and target \(36,\)"),
        ({"weight": torch.zeros(28, 11, dtype=torch.float64)}, r"weight .*\(28, 11\)"),
        ({"weight": torch.zeros(28, 12)}, "of one dtype"),
        ({"temperature": torch.ones(36)}, r"temperature \(36,\)"),
        ({"temperature": 0.0}, "temperature=0.0: it must be greater than 0"),
        ({"temperature": 1e-40}, r"temperature=1e-40: it must be greater than 2.9e-39, to divide float32 by it"),
        ({"temperature": torch.full((37,), -1.0)}, r"temperature=-1.0 at a live token"),
        (
            {"temperature": torch.full((37,), 1e-40)},
            r"temperature=.*e-4. at a live token: it must be greater than 2.9e-3",
        ),
        ({"sequence_starts": []}, "sequence_starts is empty: the first sequence begins at row 0"),
        ({"sequence_starts": [3, 9]}, "sequence_starts begins with 3: the first sequence begins at row 0, else rows"),
        ({"sequence_starts": [0, 9, 7]}, r"sequence_starts: 0, 9, 7 \(of 37 rows\) must ascend"),
        ({"sequence_starts": [0, 9, 38]}, r"sequence_starts: 9, 38, 37 \(of 37 rows\) must ascend"),
        ({"vocab_size": 29}, "vocab_size=29"),
        ({"main_grad": torch.zeros(27, 12, dtype=torch.float64)}, r"main_grad .*\(27, 12\)"),
        ({"main_grad": torch.zeros(28, 12)}, r"main_grad torch.float32"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_value(change, message):
    case = make_case(0)
    sides = {"hidden": case.hidden, "weight": case.weight, "target": case.target}
    sides |= {name: value for name, value in change.items() if name in sides}
    options = {**case.options(), "objective": objective_of(case, False)}
    options |= {name: value for name, value in change.items() if name not in sides}
    with pytest.raises(ValueError, match=message):
        linear_policy_loss(*sides.values(), **options)


def test_a_sequence_without_rows_and_the_least_temperature_are_no_mistakes():
    case = make_case(0)
    found = fused(case, chunk_tokens=8, sequence_starts=[0, 9, 9, 37])
    assert_equal(found, naive(case), TOLERANCE[torch.float64])
    flat = make_case(0, dtype=torch.float32)
    flat.hidden.zero_()
    cold, warm = (fused(flat, temperature=temperature).log_probs for temperature in (3e-39, 1.0))
    assert torch.equal(cold, warm)  # no logit differs from another
