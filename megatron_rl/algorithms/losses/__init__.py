"""The registry of token losses and the one function that sums them; each loss is a file of its own beside this one.

To add a loss: write `name.py` with a function of `(LossInputs, LossSpec) -> (loss [T], flags [T])` and add its line to
`LOSSES`. Masking, weights, KL, entropy and the sum are done here, the same for all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..kl import kl_penalty
from ..spec import LossSpec
from . import nll, ppo
from .inputs import DUAL, FREE, HIGH, LOW, LossInputs

__all__ = ["DUAL", "FREE", "HIGH", "LOSSES", "LOW", "LossInputs", "TokenLoss", "policy_loss"]

TokenLoss = Callable[[LossInputs, LossSpec], tuple[Tensor, Tensor]]
"""Unweighted loss of every token [T], differentiable in `inputs.log_probs`, and its clip flags int8 [T]."""

LOSSES: dict[str, TokenLoss] = {
    "ppo": ppo.token_loss,
    "nll": nll.token_loss,
}


def policy_loss(
    log_probs: Tensor,
    spec: LossSpec,
    *,
    old_log_probs: Tensor | None = None,
    advantages: Tensor | None = None,
    weights: Tensor,
    reference_log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`Σ_t w_t (loss_t + β KL_t - c H_t)`, a SUM: all normalisation is in the weights.

    A position with weight 0 is inert: whatever stands there (NaN and inf included) changes neither the sum nor any
    gradient. Everything is computed in float64: T numbers cost nothing, and the sum over any split of the tokens is
    then the same to about 1e-15.

    Args:
        log_probs: [T] of the current policy, with gradient.
        spec: which loss and its constants.
        old_log_probs: [T] of the policy before the first update of this batch. None: the current one, detached, which
            is right for exactly one update per batch (ratio 1).
        advantages: [T], constant within a sequence unless the loss says otherwise. Not used by `nll`.
        weights: [T], mask times normalisation (`normalisation.token_weights`).
        reference_log_probs: [T]; needed when `spec.kl_coef` is not 0.
        entropy: [T] with gradient; needed when `spec.entropy_coef` is not 0.

    Returns:
        The loss, a float64 scalar, and flags int8 [T]: 0 free, 1 clipped high, 2 clipped low, 3 dual clip.

    Raises:
        ValueError: an unknown loss, or a tensor that the spec needs is missing or has another shape.
    """
    if spec.kind not in LOSSES:
        raise ValueError(f"loss={spec.kind!r}: use one of {', '.join(sorted(LOSSES))}, or register it in losses.LOSSES")
    _check(log_probs, spec, old_log_probs, advantages, weights, reference_log_probs, entropy)
    live = weights.detach() != 0
    logp = _cleared(log_probs, live)
    old = logp.detach() if old_log_probs is None else _cleared(old_log_probs.detach(), live)
    inputs = LossInputs(
        log_probs=logp,
        old_log_probs=old,
        advantages=None if advantages is None else _cleared(advantages.detach(), live),
        live=live,
    )
    per_token, flags = LOSSES[spec.kind](inputs, spec)
    if reference_log_probs is not None and spec.kl_coef:
        reference = _cleared(reference_log_probs, live)
        per_token = per_token + spec.kl_coef * kl_penalty(
            logp, reference, old, estimator=spec.kl_estimator, unbiased=spec.kl_unbiased
        )
    if entropy is not None and spec.entropy_coef:
        per_token = per_token - spec.entropy_coef * _cleared(entropy, live)
    loss = (_cleared(weights.detach(), live) * per_token).sum()
    return loss, torch.where(live, flags, torch.zeros_like(flags))


def _cleared(values: Tensor, live: Tensor) -> Tensor:
    """float64, with 0 where not live, also in the gradient. `where`, since 0 * inf is NaN."""
    return torch.where(live, values, 0.0).double()


def _check(
    log_probs: Tensor,
    spec: LossSpec,
    old_log_probs: Tensor | None,
    advantages: Tensor | None,
    weights: Tensor,
    reference_log_probs: Tensor | None,
    entropy: Tensor | None,
) -> None:
    given = {
        "old_log_probs": old_log_probs,
        "advantages": advantages,
        "weights": weights,
        "reference_log_probs": reference_log_probs,
        "entropy": entropy,
    }
    for name, values in given.items():
        if values is not None and values.shape != log_probs.shape:
            raise ValueError(f"{name} {tuple(values.shape)}: expected the shape of log_probs, {tuple(log_probs.shape)}")
    if spec.kl_coef and reference_log_probs is None:
        raise ValueError(f"kl_coef={spec.kl_coef} needs reference_log_probs")
    if spec.entropy_coef and entropy is None:
        raise ValueError(f"entropy_coef={spec.entropy_coef} needs the entropy of every token")
