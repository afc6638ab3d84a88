"""Metrics are sums over trainable tokens divided by global counts, whatever the split."""

import math

import pytest
import torch

from megatron_rl.algorithms.losses import FREE, HIGH, REJECTED_SEQUENCE, Sequences
from megatron_rl.algorithms.normalisation import BatchCounts
from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.algorithms.token_statistics import finalise_metrics, merge_statistics, token_statistics


def random_tokens(seed, size=30):
    generator = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(size, generator=generator)
    return {
        "log_probs": logp,
        "mask": torch.rand(size, generator=generator) > 0.3,
        "old_log_probs": logp + 0.3 * torch.randn(size, generator=generator),
        "flags": torch.randint(0, 6, (size,), generator=generator, dtype=torch.int8),
        "entropy": torch.rand(size, generator=generator),
        "reference_log_probs": logp + torch.randn(size, generator=generator),
        "behaviour_log_probs": logp + 0.1 * torch.randn(size, generator=generator),
    }


def metrics_of(parts):
    tokens = sum(int(part["mask"].sum()) for part in parts)
    return finalise_metrics(merge_statistics(token_statistics(**part) for part in parts), BatchCounts(tokens, 1))


def test_a_worked_example():
    metrics = metrics_of(
        [
            {
                "log_probs": torch.tensor([-1.0, -2.0, 9.0]),
                "mask": torch.tensor([True, True, False]),
                "old_log_probs": torch.tensor([-1.0, -2.0 - math.log(2), 9.0]),
                "flags": torch.tensor([0, 1, 3], dtype=torch.int8),
                "entropy": torch.tensor([0.5, 1.5, 9.0]),
                "reference_log_probs": torch.tensor([-1.0 + math.log(3), -2.0, 9.0]),
                "behaviour_log_probs": torch.tensor([-1.0 - math.log(2), -2.0 - math.log(2), 9.0]),
            }
        ]
    )
    assert metrics == {
        "policy/ratio_mean": pytest.approx(1.5),
        "policy/kl_old": pytest.approx((2 - 1 - math.log(2)) / 2),
        "policy/clip_fraction": 0.5,
        "policy/clip_fraction_high": 0.5,
        "policy/clip_fraction_low": 0.0,
        "policy/clip_fraction_dual": 0.0,
        "policy/entropy": 1.0,
        "policy/kl_reference": pytest.approx((3 - 1 - math.log(3)) / 2),
        "gap/mean_abs": pytest.approx(math.log(2) / 2),
        "gap/kl_k3": pytest.approx((2 - 1 - math.log(2)) / 2),
        "gap/max_abs": pytest.approx(math.log(2)),
        "policy/rejected_fraction": 0.0,
        "gap/outside_fraction": 0.5,
        "gap/rho_mean": pytest.approx(1.5),
        "gap/rho_max": pytest.approx(2.0),
        "gap/ess": pytest.approx(3**2 / (2 * (4 + 1))),
    }


def test_sequence_metrics_count_every_sequence_once_whatever_its_length():
    sequences = Sequences(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([3.0, 1.0], dtype=torch.float64))
    log_ratio = torch.tensor([0.3, 0.0, 0.0, 0.5, math.nan])
    sums = token_statistics(
        torch.zeros(5),
        torch.tensor([True, True, True, True, False]),
        old_log_probs=-log_ratio,
        flags=torch.tensor([HIGH, FREE, FREE, REJECTED_SEQUENCE, FREE], dtype=torch.int8),
        behaviour_log_probs=-log_ratio - 0.2,
        spec=LossSpec(eps_low=0.2, eps_high=0.4),
        sequences=sequences,
    )
    metrics = finalise_metrics(sums, BatchCounts(4, 2))
    assert metrics["policy/clip_fraction_sequences"] == pytest.approx((1 / 3 + 0) / 2)
    assert metrics["policy/rejected_fraction_sequences"] == 0.5
    assert metrics["policy/rejected_fraction"] == 0.25
    assert metrics["policy/log_ratio_sequence_mean"] == pytest.approx((0.1 + 0.5) / 2)
    assert metrics["gap/log_rho_sequence_mean"] == pytest.approx(0.2)
    assert metrics["policy/ratio_above_fraction"] == 0.25
    assert metrics["policy/ratio_below_fraction"] == 0.0
    assert metrics["gap/ess"] == pytest.approx(1.0)


def test_one_ratio_per_sequence_has_no_share_of_token_ratios_beyond_its_bounds():
    tokens = random_tokens(0)
    names = [set(token_statistics(**tokens, spec=LossSpec(kind=kind))) for kind in ("ppo", "gspo")]
    assert names[0] - names[1] == {"ratio_above", "ratio_below"}


def test_without_trainable_tokens_no_mean_is_reported():
    """A zero would count as a collapsed entropy, and as one of several updates pull the mean of a step down."""
    tokens = random_tokens(0) | {"mask": torch.zeros(30, dtype=torch.bool)}
    assert metrics_of([tokens]) == {}
    sums = {**token_statistics(**tokens), "loss": torch.tensor(0.0)}
    assert finalise_metrics(sums, BatchCounts(0, 0)) == {"policy/loss": 0.0}


def test_only_what_was_measured_is_reported():
    tokens = random_tokens(0)
    metrics = metrics_of([{"log_probs": tokens["log_probs"], "mask": tokens["mask"]}])
    assert metrics == {"policy/ratio_mean": 1.0, "policy/kl_old": 0.0}


def test_the_loss_is_reported_as_summed():
    assert finalise_metrics({"loss": torch.tensor(0.25)}, BatchCounts(7, 2)) == {"policy/loss": 0.25}


def test_statistics_keep_no_graph():
    tokens = random_tokens(0)
    tokens["log_probs"].requires_grad_()
    assert not any(value.requires_grad for value in token_statistics(**tokens).values())


def test_ratios_stay_finite_at_any_distance():
    tokens = random_tokens(0)
    tokens["old_log_probs"] = tokens["log_probs"] - 1e4
    assert all(math.isfinite(value) for value in metrics_of([tokens]).values())
