"""Off-policy corrections: factors and rejections, token by token."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.algorithms.corrections import correct
from megatron_rl.algorithms.losses import Sequences, policy_loss
from megatron_rl.algorithms.spec import LossSpec

RHO = [0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 6.0]


@pytest.mark.parametrize(
    ("spec", "factor", "rejected"),
    [
        (LossSpec(correction="tis"), [0.25, 0.5, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0]),
        (LossSpec(correction="tis", correction_bounds=(0.4, 3)), [0.4, 0.5, 1, 2, 3, 3, 3], [0, 0, 0, 0, 0, 0, 0]),
        (LossSpec(correction="icepop", correction_bounds=(0.4, 5.5)), [0, 0.5, 1, 2, 3, 5, 0], [1, 0, 0, 0, 0, 0, 1]),
        (LossSpec(correction="mis", correction_bounds=(0.4, 5.5)), [1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0, 1]),
        (LossSpec(sequence_bounds=(0.4, 5.5)), [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_each_correction_token_by_token(spec: LossSpec, factor: list[float], rejected: list[int]) -> None:
    log_rho = torch.tensor(RHO, dtype=torch.float64).log()
    found = correct(log_rho, spec, log_rho if spec.sequence_bounds else None)
    assert found.factor.tolist() == pytest.approx(factor)
    assert found.rejected.tolist() == [bool(r) for r in rejected]
    outside = [spec.sequence_bounds is not None and not 0.4 <= rho <= 5.5 for rho in RHO]
    assert found.rejected_sequence.tolist() == outside


def test_usual_bounds_are_those_of_the_papers() -> None:
    bounds = {name: LossSpec(correction=name).token_bounds for name in ("tis", "icepop", "mis")}
    assert bounds == {"tis": (0.0, 2.0), "icepop": (0.5, 5.0), "mis": (0.5, 5.0)}


def two_sequences(spec: LossSpec) -> tuple[torch.Tensor, list[int]]:
    """Sequence 0 has rho 4 and 1/4 (geometric mean 1), sequence 1 has 1.5 and 1.5."""
    rho = torch.tensor([4.0, 0.25, 1.5, 1.5], dtype=torch.float64)
    log_probs = torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True)
    loss, flags = policy_loss(
        log_probs,
        spec,
        weights=torch.full((4,), 0.25, dtype=torch.float64),
        old_log_probs=torch.full((4,), -1.0),
        advantages=torch.ones(4),
        behaviour_log_probs=-1.0 - rho.log(),
        sequences=Sequences(torch.tensor([0, 0, 1, 1]), torch.tensor([2.0, 2.0], dtype=torch.float64)),
    )
    return torch.autograd.grad(loss, log_probs)[0], flags.tolist()


def test_a_sequence_is_judged_by_its_geometric_mean_and_combines_with_token_weights() -> None:
    gradient, flags = two_sequences(LossSpec(correction="tis", sequence_bounds=(0.8, 1.25)))
    assert gradient.tolist() == pytest.approx([-0.5, -0.0625, 0, 0])
    assert flags == [0, 0, 5, 5]


def test_the_mean_of_a_sequence_counts_tokens_that_are_rejected_themselves() -> None:
    """Without them sequence 0 would have nothing left, and be judged by nothing."""
    gradient, flags = two_sequences(LossSpec(correction="mis", correction_bounds=(0.5, 2), sequence_bounds=(0.8, 2)))
    assert gradient.tolist() == pytest.approx([0, 0, -0.25, -0.25])
    assert flags == [4, 4, 0, 0]


def test_the_factor_reaches_the_kl_term_but_not_the_entropy() -> None:
    def gradients(**options: object) -> list[float]:
        log_probs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
        entropy = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
        loss, _ = policy_loss(
            log_probs,
            LossSpec(kl_coef=0.5, entropy_coef=0.1, **options),
            weights=torch.ones(1),
            advantages=torch.zeros(1),
            old_log_probs=torch.tensor([-1.0]),
            behaviour_log_probs=torch.tensor([-1.0 - math.log(1.5)], dtype=torch.float64),
            reference_log_probs=torch.tensor([-2.0]),
            entropy=entropy,
        )
        return [g.item() for g in torch.autograd.grad(loss, (log_probs, entropy))]

    plain, tis, rejected = (
        gradients(),
        gradients(correction="tis"),
        gradients(correction="mis", correction_bounds=(0.9, 1.1)),
    )
    assert tis == [pytest.approx(1.5 * plain[0]), plain[1]]
    assert rejected == [0.0, 0.0]


def test_corrections_without_the_engines_log_probs_are_refused() -> None:
    with pytest.raises(ValueError, match="an off-policy correction needs behaviour_log_probs"):
        policy_loss(torch.zeros(1), LossSpec(correction="tis"), weights=torch.ones(1), advantages=torch.ones(1))
