"""Metrics are sums over trainable tokens divided by global counts, whatever the split."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.normalisation import BatchCounts
from megatron_rl.algorithms.token_statistics import finalise_metrics, merge_statistics, token_statistics

SEEDS = st.integers(0, 2**32 - 1)


def random_tokens(seed, size=30):
    generator = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(size, generator=generator)
    return {
        "log_probs": logp,
        "mask": torch.rand(size, generator=generator) > 0.3,
        "old_log_probs": logp + 0.3 * torch.randn(size, generator=generator),
        "flags": torch.randint(0, 4, (size,), generator=generator, dtype=torch.int8),
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
    }


@given(seed=SEEDS, cuts=st.lists(st.integers(0, 30), max_size=4))
@settings(max_examples=50, deadline=None)
def test_metrics_do_not_depend_on_the_split(seed, cuts):
    tokens = random_tokens(seed)
    edges = [0, *sorted(cuts), 30]
    parts = [{k: v[a:b] for k, v in tokens.items()} for a, b in itertools.pairwise(edges)]
    assert metrics_of(parts) == pytest.approx(metrics_of([tokens]), rel=1e-12)


@given(seed=SEEDS)
@settings(max_examples=20, deadline=None)
def test_masked_tokens_are_not_read(seed):
    tokens = random_tokens(seed)
    dirty = {k: torch.where(tokens["mask"], v, float("nan")) if v.is_floating_point() else v for k, v in tokens.items()}
    assert metrics_of([dirty]) == metrics_of([tokens])


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


def test_a_part_without_a_statistic_does_not_hide_the_others():
    tokens = random_tokens(0)
    bare = {k: tokens[k] for k in ("log_probs", "mask", "old_log_probs")}
    assert "policy/entropy" in metrics_of([bare, tokens])


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
