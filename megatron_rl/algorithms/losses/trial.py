"""A loss of one's own, tried on a few tokens before a run begins, so that a mistake in it costs seconds; built-in ones
are tested elsewhere."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from ..spec import LossSpec
from . import policy_loss
from .inputs import Sequences
from .registry import find_loss


def try_loss(spec: LossSpec) -> None:
    """Call the loss of `spec` as training will, on four tokens of two sequences, and take its gradient.

    Raises:
        ValueError: it cannot be imported, takes other arguments, raises, or returns something else than a loss [T] that
            is differentiable in `inputs.log_probs`, or that and flags int8 [T].
    """
    function = find_loss(spec.kind).token_loss
    try:
        inspect.signature(function).bind(None, spec, **spec.args)
    except TypeError as error:
        raise ValueError(
            f"loss={spec.kind!r} cannot be called as (inputs, spec{''.join(f', {key}=...' for key in spec.args)}): "
            f"{error}; write def my_loss(inputs, spec, **args), or correct algorithm.loss_args"
        ) from None
    log_probs = torch.tensor([-0.5, -1.0, -1.5, -2.0], requires_grad=True)
    tokens = torch.full_like(log_probs, -1.0).detach()
    try:
        loss, flags = policy_loss(
            log_probs,
            spec,
            weights=torch.ones(4),
            old_log_probs=tokens,
            advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
            behaviour_log_probs=tokens,
            reference_log_probs=tokens,
            entropy=tokens.neg(),
            sequences=Sequences(torch.tensor([0, 0, 1, 1]), torch.full((2,), 2.0, dtype=torch.float64)),
        )
        gradient = torch.autograd.grad(loss, log_probs, allow_unused=True)[0] if loss.requires_grad else None
    except Exception as error:  # whatever a function of a user raises
        raise ValueError(f"loss={spec.kind!r} failed on four tokens: {type(error).__name__}: {error}") from error
    _check(spec, loss, flags, gradient)


def _check(spec: LossSpec, loss: Tensor, flags: Tensor, gradient: Tensor | None) -> None:
    if flags.shape != (4,) or flags.dtype != torch.int8:
        raise ValueError(f"loss={spec.kind!r} returned flags {flags.dtype} {list(flags.shape)}; expected int8 [T]")
    if gradient is None:
        raise ValueError(f"loss={spec.kind!r} does not depend on inputs.log_probs: it would train nothing")
    if not bool(torch.isfinite(loss)) or not bool(torch.isfinite(gradient).all()):
        raise ValueError(f"loss={spec.kind!r} is not finite for ratios between exp(-1) and exp(0.5)")
