"""One advantage a sample from the rewards of its group; what the loss does with it is in `losses`.

Plain numpy in float64: a batch has thousands of rewards, not millions, and both sides (controller and ranks) can call
it. The input is the WHOLE rollout batch, of all data-parallel ranks, since whitening needs all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .spec import AdvantageSpec

UNIFORM = 1e-6
"""A group whose rewards span no more than this teaches nothing: all its advantages are 0."""
STD_OFFSET = 1e-6
WHITEN_OFFSET = 1e-8

Float = NDArray[np.float64]
Bool = NDArray[np.bool_]


def compute_advantages(
    rewards: ArrayLike,
    group_ids: ArrayLike,
    lengths: ArrayLike,
    valid: ArrayLike,
    spec: AdvantageSpec,
    running_means: ArrayLike | None = None,
) -> Float:
    """Advantages of a whole rollout batch.

        grpo                    (r - mean) / (std + 1e-6), or r - mean with std none             (2402.03300)
        dr_grpo                 r - mean                                                         (2503.20783)
        rloo                    r - mean of the others                                           (2402.14740)
        reinforce_pp            r, whitened; reinforce_pp_baseline: r - mean, then whitened      (2501.03262)

    Means and deviations are over the usable members of the group. Whitening is over trainable tokens, so a sample
    counts `lengths` times; uniform groups are excluded from it and stay 0.

    Args:
        rewards: [B] total rewards; non-finite ones leave the statistics of their group.
        group_ids: [B] anything sortable (ints or strings); members may stand anywhere in the batch.
        lengths: [B] trainable tokens N_i of each sample; only whitening uses them.
        valid: [B] bool; False = no usable reward, treated like a non-finite one. (A truncated sample that the overlong
            filter masks is still valid: it stays in its group's statistics.)
        spec: kind, std, shift_mean and the share λ of running means.
        running_means: [B] running mean reward of each sample's source, NaN where there is none yet. With λ above 0 the
            baseline of `grpo` is (1 - λ) mean + λ running mean.

    Returns:
        [B] float64, finite; 0 where `usable_samples` is False. Those samples must also be masked out of the loss.
    """
    r, ids = np.asarray(rewards, dtype=np.float64), np.asarray(group_ids)
    n, usable = np.asarray(lengths, dtype=np.float64), usable_samples(rewards, valid)
    running = np.full_like(r, np.nan) if running_means is None else np.asarray(running_means, dtype=np.float64)
    advantages, informative = np.zeros_like(r), np.zeros(r.shape, dtype=bool)
    for group in _groups(ids):
        members = group[usable[group]]
        if _is_uniform(r[members], alone_counts=spec.kind == "reinforce_pp"):
            continue
        informative[members] = True
        advantages[members] = WITHIN_GROUP[spec.kind](r[members], spec, running[members])
    if spec.kind.startswith("reinforce_pp"):
        return whiten(advantages, np.where(informative, n, 0.0), spec.shift_mean)
    return advantages


def usable_samples(rewards: ArrayLike, valid: ArrayLike) -> Bool:
    """[B] bool: samples with a finite reward among the valid ones; the others must be masked out of the loss."""
    return np.asarray(valid, dtype=bool) & np.isfinite(np.asarray(rewards, dtype=np.float64))


def whiten(values: Float, token_counts: Float, shift_mean: bool = True) -> Float:
    """`(values - mean) / sqrt(var + 1e-8)` with every sample standing for `token_counts` [B] tokens of its value.

    The variance is unbiased (tokens - 1). Samples without tokens get 0, and so does everything when there are fewer
    than 2 tokens. `shift_mean` False divides only.
    """
    counted, tokens = token_counts > 0, token_counts.sum()
    if tokens < 2:
        return np.zeros_like(values)
    mean = (values * token_counts).sum() / tokens
    variance = ((values - mean) ** 2 * token_counts).sum() / (tokens - 1)
    shifted = values - mean if shift_mean else values
    return np.where(counted, shifted / np.sqrt(variance + WHITEN_OFFSET), 0.0)


def _groups(ids: NDArray) -> list[NDArray[np.intp]]:
    """Positions of the members of every group."""
    _, inverse = np.unique(ids, return_inverse=True)
    return np.split(np.argsort(inverse, kind="stable"), np.cumsum(np.bincount(inverse))[:-1])


def _is_uniform(r: Float, alone_counts: bool) -> bool:
    if len(r) == 0:
        return True
    if len(r) == 1:
        return not alone_counts  # nothing to compare with, unless the kind has no comparison within the group
    return bool(r.max() - r.min() <= UNIFORM)


def updated_means(
    means: Mapping[str, float], sources: Sequence[str], rewards: ArrayLike, valid: ArrayLike, decay: float
) -> dict[str, float]:
    """Running mean reward by source: `decay` of the old one and the rest of this batch's mean, which begins a new one.

    Args:
        means: before this batch. sources: [B]. rewards: [B]. valid: [B] bool, as for `compute_advantages`.
    """
    r, usable = np.asarray(rewards, dtype=np.float64), usable_samples(rewards, valid)
    updated, names = dict(means), np.asarray(sources, dtype=object)
    for name in dict.fromkeys(names[usable].tolist()):
        fresh = float(r[usable & (names == name)].mean())
        updated[name] = decay * updated[name] + (1.0 - decay) * fresh if name in updated else fresh
    return updated


def _grpo(r: Float, spec: AdvantageSpec, running: Float) -> Float:
    mean = r.mean()
    shared = np.where(np.isfinite(running), (1.0 - spec.ema_baseline) * mean + spec.ema_baseline * running, mean)
    centred = r - shared if spec.ema_baseline else r - mean
    if spec.std == "none":
        return centred
    return centred / (r.std(ddof=1 if spec.std == "sample" else 0) + STD_OFFSET)


def _centred(r: Float, spec: AdvantageSpec, running: Float) -> Float:
    return r - r.mean()


def _rloo(r: Float, spec: AdvantageSpec, running: Float) -> Float:
    return r - (r.sum() - r) / (len(r) - 1)


def _raw(r: Float, spec: AdvantageSpec, running: Float) -> Float:
    return r


WITHIN_GROUP: dict[str, Callable[[Float, AdvantageSpec, Float], Float]] = {
    "grpo": _grpo,
    "dr_grpo": _centred,
    "rloo": _rloo,
    "reinforce_pp": _raw,
    "reinforce_pp_baseline": _centred,
}
