"""Sums over trainable tokens for the metrics of a step, and their division by global counts; losses are elsewhere.

Sums of micro-batches, context-parallel pieces and data-parallel ranks add up (`MAXIMA` take the maximum instead), so
metrics do not depend on any split. Their denominators are their own: token metrics divide by Σ N_i whatever the loss
normalisation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .kl import k3, safe_exp
from .losses import DUAL, HIGH, LOW
from .normalisation import BatchCounts

MAXIMA = frozenset({"gap_max_abs"})
"""Statistics that merge by maximum; all others by addition."""

METRIC_NAMES = {
    "entropy": "policy/entropy",
    "clip": "policy/clip_fraction",
    "clip_high": "policy/clip_fraction_high",
    "clip_low": "policy/clip_fraction_low",
    "clip_dual": "policy/clip_fraction_dual",
    "ratio": "policy/ratio_mean",
    "kl_old": "policy/kl_old",
    "kl_reference": "policy/kl_reference",
    "gap_abs": "gap/mean_abs",
    "gap_k3": "gap/kl_k3",
}
"""Statistic -> metric, for those that are divided by the token count."""


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
) -> dict[str, Tensor]:
    """Float64 scalars, keys of METRIC_NAMES and MAXIMA; a statistic whose tensor is not given is left out.

    Args:
        log_probs: [T] of the current policy.
        mask: [T] bool, trainable tokens; nothing else is read.
        old_log_probs: [T] -> ratio exp(logp - old) and KL(old || current) as k3. None: the current ones.
        flags: [T] int8 of `policy_loss` -> clip counts by kind.
        entropy: [T] -> its sum.
        reference_log_probs: [T] -> KL(current || reference) as k3.
        behaviour_log_probs: [T] of the engine -> its gap to `old_log_probs`: Σ |old - behaviour|, the maximum, and
            KL(behaviour || old) as k3.
    """
    live = mask.bool()
    logp = log_probs[live].double()
    old = logp if old_log_probs is None else old_log_probs[live].double()
    sums = {"ratio": safe_exp(logp - old).sum(), "kl_old": k3(logp - old).sum()}
    if flags is not None:
        kinds = flags[live]
        for name, kind in (("clip_high", HIGH), ("clip_low", LOW), ("clip_dual", DUAL)):
            sums[name] = (kinds == kind).sum().double()
        sums["clip"] = sums["clip_high"] + sums["clip_low"] + sums["clip_dual"]
    if entropy is not None:
        sums["entropy"] = entropy[live].double().sum()
    if reference_log_probs is not None:
        sums["kl_reference"] = k3(reference_log_probs[live].double() - logp).sum()
    if behaviour_log_probs is not None:
        gap = old - behaviour_log_probs[live].double()
        sums |= {"gap_abs": gap.abs().sum(), "gap_k3": k3(gap).sum()}
        sums["gap_max_abs"] = gap.abs().max() if gap.numel() else gap.new_zeros(())
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

    Args:
        sums: merged statistics, and optionally `loss`, the sum of weighted terms, which is normalised already.
        counts: global counts of what was trained on; without trainable tokens no mean is defined, and
            only the loss is among the metrics.
    """
    metrics = {}
    if counts.tokens:
        metrics = {METRIC_NAMES[k]: float(v) / counts.tokens for k, v in sums.items() if k in METRIC_NAMES}
        if "gap_max_abs" in sums:
            metrics["gap/max_abs"] = float(sums["gap_max_abs"])
    if "loss" in sums:
        metrics["policy/loss"] = float(sums["loss"])
    return metrics
