"""What comes before the formula of a policy loss: masks, sums over sequences, corrections; no loss is summed here.

Shared by `policy_loss` and by kernels with a formula of their own, so that both mean the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

from ..corrections import Correction, correct
from ..spec import LossSpec
from .inputs import REJECTED, REJECTED_SEQUENCE, LossInputs, TokenTensors
from .registry import Loss, find_loss


@dataclass(frozen=True)
class Prepared:
    """What a formula needs, float64 [T] unless said otherwise; finite everywhere if it is at trainable positions."""

    inputs: LossInputs
    weights: Tensor
    """0 where nothing counts: masked or rejected."""
    trainable: Tensor
    """bool, the mask before rejection."""
    correction: Correction | None
    """Its factor multiplies the loss and the KL term; None without a correction."""
    reference_log_probs: Tensor | None
    """None without a KL term."""
    entropy: Tensor | None
    """None without an entropy bonus."""

    def final_flags(self, flags: Tensor) -> Tensor:
        """`flags` of the formula, int8 [T], with what was rejected, and 0 where nothing is trainable."""
        if self.correction is not None:
            flags = flags.masked_fill(self.correction.rejected, REJECTED)
            flags = flags.masked_fill(self.correction.rejected_sequence, REJECTED_SEQUENCE)
        return torch.where(self.trainable, flags, torch.zeros_like(flags))


def prepare(log_probs: Tensor, spec: LossSpec, **tensors: Unpack[TokenTensors]) -> Prepared:
    """Arguments and errors of `policy_loss`. Gradients flow through `log_probs` and `entropy` only."""
    _check(log_probs, spec, tensors)
    weights, trainable = tensors["weights"].detach(), tensors.get("trainable")
    mask = weights != 0 if trainable is None else trainable.bool()
    live = mask & (weights != 0)
    logp, old = _cleared(log_probs, mask), _constant(tensors.get("old_log_probs"), mask)
    inputs = LossInputs(
        log_probs=logp,
        old_log_probs=logp.detach() if old is None else old,
        advantages=_constant(tensors.get("advantages"), mask),
        live=live,
        behaviour_log_probs=_constant(tensors.get("behaviour_log_probs"), mask),
        sequences=tensors.get("sequences"),
    )
    inputs, correction = _with_sequence_sums(inputs, spec, find_loss(spec.kind), mask)
    if correction is not None:
        live = live & ~(correction.rejected | correction.rejected_sequence)
    entropy = tensors.get("entropy") if spec.entropy_coef else None
    return Prepared(
        inputs=inputs,
        weights=_cleared(weights, live),
        trainable=mask,
        correction=correction,
        reference_log_probs=_constant(tensors.get("reference_log_probs"), live) if spec.kl_coef else None,
        entropy=None if entropy is None else _cleared(entropy, live),
    )


def _with_sequence_sums(
    inputs: LossInputs, spec: LossSpec, loss: Loss, trainable: Tensor
) -> tuple[LossInputs, Correction | None]:
    """The inputs with the sums that the loss asks for, and the correction: all of them in one sum over ranks."""
    rows = [] if loss.sequence_terms is None else [loss.sequence_terms(inputs, spec)]
    log_rho = None
    if inputs.behaviour_log_probs is not None and spec.needs_behaviour:
        log_rho = inputs.old_log_probs - inputs.behaviour_log_probs
        if spec.sequence_bounds is not None:
            rows.append(log_rho[None])
    if rows:
        if inputs.sequences is None:
            raise ValueError(
                f"loss={spec.kind} with sequence_bounds={spec.sequence_bounds} compares whole sequences: pass "
                "`sequences`, which say where each begins and how long it is"
            )
        inputs = replace(inputs, sequence_sums=inputs.sequences.sums(torch.cat(rows), trainable))
    if log_rho is None:
        return inputs, None
    return inputs, correct(log_rho, spec, inputs.sequence_mean(-1) if spec.sequence_bounds is not None else None)


def _cleared(values: Tensor, live: Tensor) -> Tensor:
    """float64, with 0 where not live, also in the gradient. `where`, since 0 * inf is NaN."""
    return torch.where(live, values, 0.0).double()


def _constant(values: Tensor | None, live: Tensor) -> Tensor | None:
    """The same without gradient."""
    return None if values is None else _cleared(values.detach(), live)


def _check(log_probs: Tensor, spec: LossSpec, tensors: TokenTensors) -> None:
    found = {name: values for name, values in tensors.items() if isinstance(values, Tensor)}
    if (sequences := tensors.get("sequences")) is not None:
        found["sequences.index"] = sequences.index
    for name, values in found.items():
        if values.shape != log_probs.shape:
            raise ValueError(f"{name} {tuple(values.shape)}: expected the shape of log_probs, {tuple(log_probs.shape)}")
    needed = {
        "reference_log_probs": (spec.kl_coef != 0, f"kl_coef={spec.kl_coef}"),
        "entropy": (spec.entropy_coef != 0, f"entropy_coef={spec.entropy_coef}"),
        "behaviour_log_probs": (spec.needs_behaviour, "an off-policy correction"),
    }
    for name, (wanted, reason) in needed.items():
        if wanted and name not in found:
            raise ValueError(f"{reason} needs {name}, one number per token")
