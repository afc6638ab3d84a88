"""Estimators of the KL divergence to the reference policy, for the loss (torch) and for the reward (numpy).

With d = ref - logp on tokens that the policy sampled: k1 = -d, k2 = d²/2, k3 = exp(d) - d - 1
(http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp never sees more than this, in either direction; where the clamp binds the gradient is 0."""


def safe_exp(log_ratio: Tensor) -> Tensor:
    """exp of the argument clamped to [-20, 20], with gradient 0 where the clamp binds."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def k3(log_ratio: Tensor) -> Tensor:
    """exp(d) - d - 1 >= 0 of the clamped d: all of d is clamped, or the linear part would push the wrong way."""
    d = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(d) - d


def kl_penalty(
    log_probs: Tensor, reference_log_probs: Tensor, old_log_probs: Tensor, *, estimator: str, unbiased: bool
) -> Tensor:
    """KL(policy || reference) per token, differentiable in `log_probs`.

    Tokens come from the old policy, so the unbiased forms carry the importance ratio w = exp(logp - old): k3 the
    differentiable w (the gradient of w k3 is then that of the KL itself), k2 the detached w (k2's own gradient
    -d is already the integrand).

    Args:
        log_probs, reference_log_probs, old_log_probs: [T], finite (masked positions already cleared).
        estimator: "k2" or "k3".
        unbiased: multiply by w.
    """
    d = reference_log_probs.detach() - log_probs
    penalty = k3(d) if estimator == "k3" else 0.5 * d.square()
    if not unbiased:
        return penalty
    w = safe_exp(log_probs - old_log_probs.detach())
    return penalty * (w if estimator == "k3" else w.detach())


def kl_in_reward(
    rewards: ArrayLike,
    old_log_probs: ArrayLike,
    reference_log_probs: ArrayLike,
    mask: ArrayLike,
    offsets: ArrayLike,
    coef: float,
) -> NDArray[np.float64]:
    """`r_i - β Σ_t m (old_logp - ref_logp)`: k1 in the reward, to be applied before group statistics.

    Args:
        rewards: [B]. old_log_probs, reference_log_probs, mask: [T], sequences one after another.
        offsets: [B + 1]; sequence i is [offsets[i], offsets[i + 1]).
        coef: β.

    Returns:
        [B] float64.
    """
    live = np.asarray(mask, dtype=bool)
    old, reference = (
        np.where(live, np.asarray(x, dtype=np.float64), 0.0) for x in (old_log_probs, reference_log_probs)
    )
    gap = old - reference
    r, bounds = np.asarray(rewards, dtype=np.float64), np.asarray(offsets)
    sequence = np.repeat(np.arange(len(r)), np.diff(bounds))
    return r - coef * np.bincount(sequence, weights=gap[bounds[0] : bounds[-1]], minlength=len(r))
