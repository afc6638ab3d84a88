"""The one function that sums token losses; each loss is a file of its own beside this one, its name in `registry`.

Masking, weights, sums over sequences, off-policy corrections, KL, entropy and the sum are done here, the same for all.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..corrections import Correction, correct
from ..kl import kl_penalty
from ..spec import LossSpec
from .inputs import DUAL, FREE, HIGH, LOW, REJECTED, REJECTED_SEQUENCE, LossInputs, Sequences
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
    "Sequences",
    "TokenLoss",
    "find_loss",
    "policy_loss",
]


def policy_loss(
    log_probs: Tensor,
    spec: LossSpec,
    *,
    weights: Tensor,
    old_log_probs: Tensor | None = None,
    advantages: Tensor | None = None,
    behaviour_log_probs: Tensor | None = None,
    reference_log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
    trainable: Tensor | None = None,
    sequences: Sequences | None = None,
) -> tuple[Tensor, Tensor]:
    """`Σ_t w_t (f_t (loss_t + β KL_t) - c H_t)`, a SUM: all normalisation is in the weights.

    f is the factor of the off-policy correction (1 without one), and a rejected token has w = 0. A position with weight
    0 is inert: whatever stands there (NaN and inf included) changes neither the sum nor any gradient, except that a
    trainable one belongs to the ratio of its sequence. Everything is computed in float64: T numbers cost nothing, and
    the sum over any split of the tokens is then the same to about 1e-15.

    Args:
        log_probs: [T] of the current policy, with gradient.
        spec: which loss and its constants.
        weights: [T], mask times normalisation (`normalisation.token_weights`).
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
    loss = find_loss(spec.kind)
    tensors = {
        "old_log_probs": old_log_probs,
        "advantages": advantages,
        "weights": weights,
        "behaviour_log_probs": behaviour_log_probs,
        "reference_log_probs": reference_log_probs,
        "entropy": entropy,
        "trainable": trainable,
        "sequences.index": None if sequences is None else sequences.index,
    }
    _check(log_probs, spec, tensors)
    weights = weights.detach()
    trainable = weights != 0 if trainable is None else trainable.bool()
    live = trainable & (weights != 0)
    logp = _cleared(log_probs, trainable)
    inputs = LossInputs(
        log_probs=logp,
        old_log_probs=logp.detach() if old_log_probs is None else _cleared(old_log_probs.detach(), trainable),
        advantages=None if advantages is None else _cleared(advantages.detach(), trainable),
        live=live,
        behaviour_log_probs=None if behaviour_log_probs is None else _cleared(behaviour_log_probs.detach(), trainable),
        sequences=sequences,
    )
    inputs, correction = _with_sequence_sums(inputs, spec, loss, trainable)
    result = loss.token_loss(inputs, spec, **spec.args)
    per_token, flags = result if isinstance(result, tuple) else (result, torch.full_like(live, FREE, dtype=torch.int8))
    if reference_log_probs is not None and spec.kl_coef:
        reference = _cleared(reference_log_probs, live)
        per_token = per_token + spec.kl_coef * kl_penalty(
            logp, reference, inputs.old_log_probs, estimator=spec.kl_estimator, unbiased=spec.kl_unbiased
        )
    if correction is not None:
        per_token = correction.factor * per_token
        live = live & ~(correction.rejected | correction.rejected_sequence)
        flags = flags.masked_fill(correction.rejected, REJECTED)
        flags = flags.masked_fill(correction.rejected_sequence, REJECTED_SEQUENCE)
    if entropy is not None and spec.entropy_coef:
        per_token = per_token - spec.entropy_coef * _cleared(entropy, live)
    return (_cleared(weights, live) * per_token).sum(), torch.where(trainable, flags, torch.zeros_like(flags))


def _with_sequence_sums(
    inputs: LossInputs, spec: LossSpec, loss: Loss, trainable: Tensor
) -> tuple[LossInputs, Correction | None]:
    """The inputs with the sums that the loss asks for, and the correction: all of them in one sum over ranks."""
    rows = []
    if loss.sequence_terms is not None:
        rows.append(loss.sequence_terms(inputs, spec))
    log_rho = None
    if inputs.behaviour_log_probs is not None and spec.needs_behaviour:
        log_rho = inputs.old_log_probs - inputs.behaviour_log_probs
        if spec.sequence_bounds is not None:
            rows.append(log_rho[None])
    if rows:
        if inputs.sequences is None:
            raise ValueError(f"loss={spec.kind} with these corrections compares whole sequences: pass `sequences`")
        inputs = replace(inputs, sequence_sums=inputs.sequences.sums(torch.cat(rows), trainable))
    if log_rho is None:
        return inputs, None
    return inputs, correct(log_rho, spec, inputs.sequence_mean(-1) if spec.sequence_bounds is not None else None)


def _cleared(values: Tensor, live: Tensor) -> Tensor:
    """float64, with 0 where not live, also in the gradient. `where`, since 0 * inf is NaN."""
    return torch.where(live, values, 0.0).double()


def _check(log_probs: Tensor, spec: LossSpec, tensors: dict[str, Tensor | None]) -> None:
    for name, values in tensors.items():
        if values is not None and values.shape != log_probs.shape:
            raise ValueError(f"{name} {tuple(values.shape)}: expected the shape of log_probs, {tuple(log_probs.shape)}")
    needed = {
        "reference_log_probs": (spec.kl_coef != 0, f"kl_coef={spec.kl_coef}"),
        "entropy": (spec.entropy_coef != 0, f"entropy_coef={spec.entropy_coef}"),
        "behaviour_log_probs": (spec.needs_behaviour, "an off-policy correction"),
    }
    for name, (wanted, reason) in needed.items():
        if wanted and tensors[name] is None:
            raise ValueError(f"{reason} needs {name}, one number per token")
