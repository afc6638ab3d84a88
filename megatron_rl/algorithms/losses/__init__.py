"""The one function that sums token losses; each loss is a file of its own beside this one, its name in `registry`.

Masking, weights, sums over sequences and off-policy corrections are in `prepare`; KL, entropy and the sum are here.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from ..kl import kl_penalty
from ..spec import LossSpec
from .inputs import DUAL, FREE, HIGH, LOW, REJECTED, REJECTED_SEQUENCE, LossInputs, Sequences, TokenTensors
from .prepare import Prepared, prepare
from .registry import LOSSES, Loss, TokenLoss, find_loss

__all__ = [
    "DUAL",
    "FREE",
    "HIGH",
    "LOSSES",
    "LOW",
    "REJECTED",
    "REJECTED_SEQUENCE",
    "Loss",
    "LossInputs",
    "Prepared",
    "Sequences",
    "TokenLoss",
    "TokenTensors",
    "find_loss",
    "policy_loss",
    "prepare",
]


def policy_loss(log_probs: Tensor, spec: LossSpec, **tensors: Unpack[TokenTensors]) -> tuple[Tensor, Tensor]:
    """`Σ_t w_t (f_t (loss_t + β KL_t) - c H_t)`, a SUM: all normalisation is in the weights.

    f is the factor of the off-policy correction (1 without one), and a rejected token has w = 0. A position with weight
    0 is inert: whatever stands there (NaN and inf included) changes neither the sum nor any gradient, except that a
    trainable one belongs to the ratio of its sequence. Everything is computed in float64: T numbers cost nothing, and
    the sum over any split of the tokens is then the same to about 1e-15.

    Args:
        log_probs: [T] of the current policy, with gradient.
        spec: which loss and its constants.
        weights: [T], mask times normalisation (`normalisation.token_weights`); always needed.
        old_log_probs: [T] of the policy before the first update of this batch. None: the current one, detached, which
            is right for exactly one update per batch (ratio 1).
        advantages: [T], constant within a sequence unless the loss says otherwise. Not used by `nll`.
        behaviour_log_probs: [T] of the engine; needed when `spec.needs_behaviour`.
        reference_log_probs: [T]; needed when `spec.kl_coef` is not 0.
        entropy: [T] with gradient; needed when `spec.entropy_coef` is not 0.
        trainable: bool [T], the mask m before any rejection. None: where the weight is not 0.
        sequences: needed when `spec.needs_sequences`; every sequence must then be here with all its tokens, or
            `sum_over_ranks` must bring in the others.

    Returns:
        The loss, a float64 scalar, and flags int8 [T] of `inputs`.

    Raises:
        ValueError: an unknown loss, or a tensor that the spec needs is missing or has another shape.
    """
    ready = prepare(log_probs, spec, **tensors)
    inputs = ready.inputs
    result = find_loss(spec.kind).token_loss(inputs, spec, **spec.args)
    per_token, flags = result if isinstance(result, tuple) else (result, _free(inputs))
    if per_token.shape != log_probs.shape:
        raise ValueError(
            f"loss={spec.kind} returned {tuple(per_token.shape)}: expected one number per token, unweighted"
        )
    if ready.reference_log_probs is not None:
        per_token = per_token + spec.kl_coef * kl_penalty(
            inputs.log_probs,
            ready.reference_log_probs,
            inputs.old_log_probs,
            estimator=spec.kl_estimator,
            unbiased=spec.kl_unbiased,
        )
    if ready.correction is not None:
        per_token = ready.correction.factor * per_token
    if ready.entropy is not None:
        per_token = per_token - spec.entropy_coef * ready.entropy
    return (ready.weights * per_token).sum(), ready.final_flags(flags)


def _free(inputs: LossInputs) -> Tensor:
    return torch.full_like(inputs.live, FREE, dtype=torch.int8)
