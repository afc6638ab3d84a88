"""Names to losses: the built-in ones and the hook `module:function`; what a loss is given stands in `inputs`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from ..spec import LossSpec
from . import cispo, gmpo, gspo, nll, opmd, ppo, sapo
from .inputs import LossInputs

TokenLoss = Callable[..., tuple[Tensor, Tensor] | Tensor]
"""`(inputs, spec, **spec.args)` -> unweighted loss of every token [T], differentiable in `inputs.log_probs`, and its
flags int8 [T]; a loss without clips may return the first alone."""
SequenceTerms = Callable[[LossInputs, LossSpec], Tensor]
"""-> [K, T], what is to be summed over the trainable tokens of each sequence before the loss is asked."""


@dataclass(frozen=True)
class Loss:
    """One entry of the registry."""

    token_loss: TokenLoss
    sequence_terms: SequenceTerms | None = None


LOSSES: dict[str, Loss] = {
    "ppo": Loss(ppo.token_loss),
    "gspo": Loss(gspo.token_loss, gspo.sequence_terms),
    "gspo_token": Loss(gspo.token_loss, gspo.sequence_terms),
    "cispo": Loss(cispo.token_loss),
    "sapo": Loss(sapo.token_loss),
    "gmpo": Loss(gmpo.token_loss, gmpo.sequence_terms),
    "opmd": Loss(opmd.token_loss, opmd.sequence_terms),
    "nll": Loss(nll.token_loss),
}


def find_loss(name: str) -> Loss:
    """The built-in loss of that name, or the function that `module:function` names, with its `sequence_terms` if any.

    Raises:
        ValueError: neither, or it cannot be imported; the message says what is allowed.
    """
    return LOSSES[name] if name in LOSSES else _import(name)


@cache
def _import(name: str) -> Loss:
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        close = difflib.get_close_matches(name, LOSSES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(
            f"loss={name!r} is unknown{hint}: use one of {', '.join(sorted(LOSSES))}, or module:function for a loss of "
            "your own"
        )
    try:
        function: Any = getattr(import_module(module_name), function_name)
    except Exception as error:  # whatever the module of a user does on import
        raise ValueError(
            f"loss={name!r} cannot be imported ({type(error).__name__}: {error}); its module must be installed, or lie "
            "in a directory named in PYTHONPATH"
        ) from error
    if not callable(function):
        raise ValueError(f"loss={name!r}: {function_name!r} is {type(function).__name__}, not a function")
    return Loss(function, getattr(function, "sequence_terms", None))
