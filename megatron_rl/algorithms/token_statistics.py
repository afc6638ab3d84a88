"""Sums over trainable tokens for the metrics of a step, and their division by global counts; losses are elsewhere.

Sums of micro-batches, context-parallel pieces and data-parallel ranks add up (`MAXIMA` take the maximum instead), so
metrics do not depend on any split. Their denominators are their own, whatever the loss normalisation: Σ N_i for token
metrics and B for sequence metrics, which are sums over tokens too: each counts 1 / N_i of its sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .kl import k3, safe_exp
from .losses import DUAL, HIGH, LOW, REJECTED, REJECTED_SEQUENCE, Sequences, find_loss
from .normalisation import BatchCounts
from .spec import LossSpec

USUAL_RHO = (0.8, 1.25)
"""A ratio of trainer to engine outside of these is counted as a token on which they disagree."""

MAXIMA = {"gap_max_abs": "gap/max_abs", "rho_max": "gap/rho_max"}
"""Statistic -> metric, for those that merge by maximum; all others merge by addition."""

METRIC_NAMES = {
    "entropy": "policy/entropy",
    "clip": "policy/clip_fraction",
    "clip_high": "policy/clip_fraction_high",
    "clip_low": "policy/clip_fraction_low",
    "clip_dual": "policy/clip_fraction_dual",
    "rejected": "policy/rejected_fraction",
    "ratio": "policy/ratio_mean",
    "ratio_above": "policy/ratio_above_fraction",
    "ratio_below": "policy/ratio_below_fraction",
    "kl_old": "policy/kl_old",
    "kl_reference": "policy/kl_reference",
    "gap_abs": "gap/mean_abs",
    "gap_k3": "gap/kl_k3",
    "gap_outside": "gap/outside_fraction",
    "rho": "gap/rho_mean",
}
"""Statistic -> metric, for those that are divided by the token count."""

SEQUENCE_METRIC_NAMES = {
    "clip_sequences": "policy/clip_fraction_sequences",
    "rejected_sequences": "policy/rejected_fraction_sequences",
    "log_ratio_sequences": "policy/log_ratio_sequence_mean",
    "log_rho_sequences": "gap/log_rho_sequence_mean",
}
"""Statistic -> metric, for those that are divided by the sequence count."""

SUMS = frozenset({*METRIC_NAMES, *SEQUENCE_METRIC_NAMES, "rho_square"})
"""All statistics that merge by addition."""


@torch.no_grad()
def token_statistics(
    log_probs: Tensor,
    mask: Tensor,
    *,
    old_log_probs: Tensor | None = None,
    flags: Tensor | None = None,
    entropy: Tensor | None = None,
    reference_log_probs: Tensor | None = None,
    behaviour_log_probs: Tensor | None = None,
    spec: LossSpec | None = None,
    sequences: Sequences | None = None,
) -> dict[str, Tensor]:
    """Float64 scalars, keys of SUMS and MAXIMA; a statistic whose tensor is not given is left out.

    Args:
        log_probs: [T] of the current policy.
        mask: [T] bool, trainable tokens before any rejection; nothing else is read.
        old_log_probs: [T] -> ratio exp(logp - old) and KL(old || current) as k3. None: the current ones.
        flags: [T] int8 of `policy_loss` -> clip counts by kind, and rejections.
        entropy: [T] -> its sum.
        reference_log_probs: [T] -> KL(current || reference) as k3.
        behaviour_log_probs: [T] of the engine -> its gap to `old_log_probs`: Σ |old - behaviour|, the maximum,
            KL(behaviour || old) as k3, and moments of the raw ratio ρ = exp(old - behaviour) before any truncation.
        spec: -> ratios beyond the clip bounds whatever the advantage, for losses with one ratio per token.
        sequences: index and lengths -> sequence metrics.
    """
    live = mask.bool()
    logp = log_probs[live].double()
    old = logp if old_log_probs is None else old_log_probs[live].double()
    ratio = safe_exp(logp - old)
    share = None if sequences is None else 1.0 / sequences.lengths.double()[sequences.index[live]]
    sums = {"ratio": ratio.sum(), "kl_old": k3(logp - old).sum()}
    if spec is not None and find_loss(spec.kind).sequence_terms is None:
        sums["ratio_above"] = (ratio > 1.0 + spec.eps_high).sum().double()
        sums["ratio_below"] = (ratio < 1.0 - spec.eps_low).sum().double()
    if share is not None:
        sums["log_ratio_sequences"] = ((logp - old) * share).sum()
    if flags is not None:
        sums |= _from_flags(flags[live], share)
    if entropy is not None:
        sums["entropy"] = entropy[live].double().sum()
    if reference_log_probs is not None:
        sums["kl_reference"] = k3(reference_log_probs[live].double() - logp).sum()
    if behaviour_log_probs is not None:
        sums |= _gap(old - behaviour_log_probs[live].double(), share)
    return sums


def _from_flags(kinds: Tensor, share: Tensor | None) -> dict[str, Tensor]:
    clips = (("clip_high", HIGH), ("clip_low", LOW), ("clip_dual", DUAL))
    sums = {name: (kinds == kind).sum().double() for name, kind in clips}
    sums["clip"] = sums["clip_high"] + sums["clip_low"] + sums["clip_dual"]
    sums["rejected"] = (kinds >= REJECTED).sum().double()
    if share is not None:
        clipped = (kinds == HIGH) | (kinds == LOW) | (kinds == DUAL)
        sums["clip_sequences"] = share[clipped].sum()
        sums["rejected_sequences"] = share[kinds == REJECTED_SEQUENCE].sum()
    return sums


def _gap(log_rho: Tensor, share: Tensor | None) -> dict[str, Tensor]:
    rho, none = safe_exp(log_rho), log_rho.new_zeros(())
    sums = {
        "gap_abs": log_rho.abs().sum(),
        "gap_k3": k3(log_rho).sum(),
        "gap_max_abs": log_rho.abs().max() if log_rho.numel() else none,
        "gap_outside": ((rho < USUAL_RHO[0]) | (rho > USUAL_RHO[1])).sum().double(),
        "rho": rho.sum(),
        "rho_square": rho.square().sum(),
        "rho_max": rho.max() if rho.numel() else none,
    }
    if share is not None:
        sums["log_rho_sequences"] = (log_rho * share).sum()
    return sums


def merge_statistics(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Statistics of several micro-batches as one."""
    merged: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            else:
                merged[name] = torch.maximum(merged[name], value) if name in MAXIMA else merged[name] + value
    return merged


def finalise_metrics(sums: Mapping[str, Tensor | float], counts: BatchCounts) -> dict[str, float]:
    """Metrics of a step from statistics that were merged over everything.

    `gap/ess` is the effective sample size of ρ as a share of the tokens, (Σ ρ)² / (N Σ ρ²): 1 when trainer and engine
    agree.

    Args:
        sums: merged statistics, and optionally `loss`, the sum of weighted terms, which is normalised already.
        counts: global counts of what was trained on; without trainable tokens no mean is defined, and
            only the loss is among the metrics.
    """
    metrics = {}
    if counts.tokens:
        metrics = {METRIC_NAMES[k]: float(v) / counts.tokens for k, v in sums.items() if k in METRIC_NAMES}
        metrics |= {n: float(sums[k]) / counts.sequences for k, n in SEQUENCE_METRIC_NAMES.items() if k in sums}
        metrics |= {n: float(sums[k]) for k, n in MAXIMA.items() if k in sums}
        if "rho_square" in sums:
            metrics["gap/ess"] = float(sums["rho"]) ** 2 / (counts.tokens * float(sums["rho_square"]))
    if "loss" in sums:
        metrics["policy/loss"] = float(sums["loss"])
    return metrics
