"""Which settings of `algorithm:` exclude each other, with the reason and the way out; other sections are not read here.

Each rule yields complaints that name key, value and what to write instead.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .algorithm import AlgorithmConfig

LOSS_ARGS: dict[str, tuple[str, ...]] = {
    "ppo": (),
    "gspo": (),
    "gspo_token": (),
    "cispo": (),
    "sapo": ("tau_positive", "tau_negative"),
    "gmpo": (),
    "opmd": ("tau",),
}
"""Policy losses and the arguments that `algorithm.loss_args` may give them."""
CORRECTION_BOUNDS = {"tis": (0.0, 2.0), "icepop": (0.5, 5.0), "mis": (0.5, 5.0)}
"""Corrections of single tokens, and the bounds they get unless others are given."""
ONE_RATIO_PER_SEQUENCE = ("gspo", "gspo_token", "gmpo")
REJECTING = ("icepop", "mis", "seq_mis")
"""Corrections that take tokens out of the loss."""


def problems(a: AlgorithmConfig) -> Iterator[str]:
    """Everything in the section that cannot be computed or would have no effect."""
    for rule in (_loss, _kl, _old_log_probs, _corrections, _baseline):
        yield from rule(a)


def _loss(a: AlgorithmConfig) -> Iterator[str]:
    if a.loss not in LOSS_ARGS:
        if not all(a.loss.partition(":")):
            close = difflib.get_close_matches(a.loss, LOSS_ARGS, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            yield f"loss={a.loss}: use one of {', '.join(LOSS_ARGS)}, or module:function for a loss of your own{hint}"
        return
    for key, value in a.loss_args.items():
        if key not in LOSS_ARGS[a.loss]:
            yield f"loss_args.{key}: loss={a.loss} takes {', '.join(LOSS_ARGS[a.loss]) or 'no arguments'}; leave it out"
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            yield f"loss_args.{key}={value!r}: write a finite number greater than 0"
    if a.loss in ONE_RATIO_PER_SEQUENCE and a.normalisation != "seq_mean_token_mean":
        yield (
            f"normalisation={a.normalisation}: loss={a.loss} has one ratio per sequence, so every sequence must weigh "
            "the same; use normalisation=seq_mean_token_mean"
        )
    if a.dual_clip is not None and a.loss != "ppo":
        yield f"dual_clip={a.dual_clip}: it bounds the ratio of loss=ppo and has no place in {a.loss}; use null"


def _kl(a: AlgorithmConfig) -> Iterator[str]:
    if a.kl_place == "loss" and a.kl_estimator == "k1":
        yield "kl_estimator=k1: in a loss its expected gradient is zero; use k3 or k2, or kl_place=reward"
    if a.kl_place == "reward":
        if a.kl_estimator != "k1":
            yield f"kl_estimator={a.kl_estimator}: kl_place=reward subtracts k1; use k1, or kl_place=loss"
        if a.kl_coef == 0:
            yield "kl_place=reward with kl_coef=0 subtracts nothing; set kl_coef, or leave kl_place out"
        if a.old_logprobs == "reuse":
            yield (
                "kl_place=reward needs the old log-probs of the whole batch before its advantages, and "
                "old_logprobs=reuse has none; use old_logprobs=recompute or rollout"
            )


def _old_log_probs(a: AlgorithmConfig) -> Iterator[str]:
    if a.old_logprobs == "reuse" and a.updates_per_batch != 1:
        yield (
            "old_logprobs=reuse means ratio 1, which holds for one update per batch only, but updates_per_batch="
            f"{a.updates_per_batch}; use old_logprobs=recompute"
        )


def _corrections(a: AlgorithmConfig) -> Iterator[str]:
    names = ", ".join(a.corrections)
    on_tokens = [name for name in a.corrections if name != "seq_mis"]
    if len(on_tokens) > 1 or len(set(a.corrections)) != len(a.corrections):
        yield f"corrections=[{names}]: use one of tis, icepop and mis, and seq_mis beside it if wanted"
    if a.corrections and a.old_logprobs == "rollout":
        yield (
            f"corrections=[{names}] compare old log-probs with the engine's, and old_logprobs=rollout makes them "
            "equal; use old_logprobs=recompute, or leave corrections out"
        )
    if "seq_mis" in a.corrections and a.seq_mis_bounds is None:
        yield "corrections=[seq_mis] needs bounds on the geometric-mean ratio, such as seq_mis_bounds=[0.99, 1.01]"
    if a.seq_mis_bounds is not None and "seq_mis" not in a.corrections:
        yield f"seq_mis_bounds={list(a.seq_mis_bounds)} has no effect without corrections=[seq_mis]; add it"
    if a.correction_bounds is not None and not on_tokens:
        yield f"correction_bounds={list(a.correction_bounds)} has no effect without tis, icepop or mis in corrections"
    for key in ("correction_bounds", "seq_mis_bounds"):
        bounds = getattr(a, key)
        if bounds is not None and not (0 <= bounds[0] <= 1 <= bounds[1] and bounds[0] < bounds[1]):
            yield (
                f"{key}={list(bounds)}: write [lower, upper] with 0 <= lower <= 1 <= upper and lower < upper, since a "
                "token on which engine and trainer agree has ratio 1"
            )
    if a.renormalise_after_rejection and a.old_logprobs == "reuse":
        yield (
            "renormalise_after_rejection=true needs to know before the update what is rejected, and "
            "old_logprobs=reuse knows it only afterwards; use old_logprobs=recompute"
        )


def _baseline(a: AlgorithmConfig) -> Iterator[str]:
    if a.ema_baseline and a.advantage != "grpo":
        yield f"ema_baseline={a.ema_baseline}: it belongs to advantage=grpo, not {a.advantage}; use 0"
