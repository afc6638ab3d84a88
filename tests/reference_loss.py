"""The loss written down once more, slowly: float64, one response after the other, autograd with an explicit `sg`.

What the tests of losses compare with. It shares no code with `megatron_rl`, sees the whole batch at once and knows
nothing of masks inside a formula: a response is cut down to its trainable tokens before anything is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Recipe:
    """What is computed."""

    loss: str = "ppo"
    eps_low: float = 0.2
    eps_high: float = 0.28
    dual_clip: float | None = None
    normalisation: str = "token_mean"
    max_length: float = 1.0
    """L of normalisation `constant`."""
    token_correction: str = "none"
    """none, tis, icepop or mis."""
    token_bounds: tuple[float, float] = (0.0, 2.0)
    sequence_bounds: tuple[float, float] | None = None
    """Of the geometric mean of ρ; None = no sequence is rejected for it."""
    renormalise: bool = False
    kl: str = "k3"
    kl_coef: float = 0.0
    kl_unbiased: bool = True
    entropy_coef: float = 0.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    """Of `sapo`."""
    tau: float = 1.0
    """Of `opmd`."""


@dataclass(frozen=True)
class Response:
    """[L] each, one entry a position; whatever stands where `mask` is False is not looked at."""

    log_probs: Tensor
    """float64, with a graph when gradients are wanted; likewise `entropy`."""
    entropy: Tensor
    mask: Tensor
    advantages: Tensor
    old: Tensor | None
    """None: the current policy, detached."""
    behaviour: Tensor | None = None
    reference: Tensor | None = None

    def trainable(self) -> Response:
        """Only the positions of the mask, in float64."""

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[self.mask].double()

        log_probs, entropy, advantages = cut(self.log_probs), cut(self.entropy), cut(self.advantages)
        assert log_probs is not None
        assert entropy is not None
        assert advantages is not None
        old = sg(log_probs) if self.old is None else cut(self.old)
        mask = torch.ones(len(log_probs), dtype=torch.bool)
        return Response(log_probs, entropy, mask, advantages, old, cut(self.behaviour), cut(self.reference))


@dataclass(frozen=True)
class Result:
    """Of the whole batch."""

    loss: Tensor
    sum_of_terms: float
    """Σ |weighted terms of a token|, its KL and entropy apart: what an error of the loss is relative to."""
    metrics: dict[str, float]


def evaluate(responses: Sequence[Response], recipe: Recipe) -> Result:
    """Loss, with graph, and metrics of a batch."""
    cut = [response.trainable() for response in responses]
    rejections, factors = zip(*(correct(r, recipe) for r in cut), strict=True)
    kept = [torch.tensor([not word for word in words], dtype=torch.bool) for words in rejections]
    counts = [int(keep.sum()) for keep in kept] if recipe.renormalise else [len(r.log_probs) for r in cut]
    weights = token_weights(counts, recipe)
    terms = [torch.zeros(0, dtype=torch.float64, requires_grad=True)]  # for a batch without tokens
    flags, sum_of_terms = [], 0.0
    for r, words, keep, factor, weight in zip(cut, rejections, kept, factors, weights, strict=True):
        if not len(r.log_probs):
            continue
        loss, clipped = LOSSES[recipe.loss](r, recipe)
        parts = factor * loss, factor * recipe.kl_coef * kl(r, recipe), -recipe.entropy_coef * r.entropy
        terms.append(weight * sum(parts)[keep])
        sum_of_terms += float(weight) * sum(float(part.detach()[keep].abs().sum()) for part in parts)
        flags.append([word or flag for word, flag in zip(words, clipped, strict=True)])
    return Result(torch.cat(terms).sum(), sum_of_terms, metrics(cut, flags, recipe))


def sg(x: Tensor) -> Tensor:
    """Stop-gradient."""
    return x.detach()


def exp20(x: Tensor) -> Tensor:
    """exp of the argument clamped to [-20, 20]; gradient 0 beyond."""
    return x.clamp(-20.0, 20.0).exp()


# --------------------------------------------------------------------------------------------------------- policy loss
# Each: (loss of every token, flag of every token: "", "high", "low" or "dual").

Flags = list[str]


def clipped_surrogate(ratio: Tensor, advantages: Tensor, recipe: Recipe) -> tuple[Tensor, Flags]:
    """-min(r A, clip(r) A), and the dual clip."""
    low, high = 1 - recipe.eps_low, 1 + recipe.eps_high
    losses, flags = [], []
    for r, a in zip(ratio, advantages, strict=True):
        loss = -torch.minimum(r * a, r.clamp(low, high) * a)
        flag = "high" if a > 0 and r > high else "low" if a < 0 and r < low else ""
        if recipe.dual_clip is not None and a < 0 and r > recipe.dual_clip:
            loss, flag = torch.minimum(loss, -recipe.dual_clip * a), "dual"
        losses.append(loss)
        flags.append(flag)
    return torch.stack(losses), flags


def ppo(r: Response, recipe: Recipe) -> tuple[Tensor, Flags]:
    return clipped_surrogate(exp20(r.log_probs - old(r)), r.advantages, recipe)


def mean_log_ratio(r: Response) -> Tensor:
    return (r.log_probs - old(r)).sum() / len(r.log_probs)


def gspo(r: Response, recipe: Recipe) -> tuple[Tensor, Flags]:
    if recipe.token_correction != "none":  # tokens of unequal weight: dL/dlogp = -weight A s is stated, not derived
        return gspo_token(r, recipe)
    return clipped_surrogate(exp20(mean_log_ratio(r)).expand(len(r.log_probs)), r.advantages, recipe)


def gspo_token(r: Response, recipe: Recipe) -> tuple[Tensor, Flags]:
    return clipped_surrogate(exp20(shared(mean_log_ratio(r), r.log_probs)), r.advantages, recipe)


def shared(mean: Tensor, x: Tensor) -> Tensor:
    """The mean for each token, with gradient 1 into its own x and none into the others'."""
    return sg(mean) + (x - sg(x))


def cispo(r: Response, recipe: Recipe) -> tuple[Tensor, Flags]:
    low, high = 1 - recipe.eps_low, 1 + recipe.eps_high
    ratio = exp20(sg(r.log_probs) - old(r))
    flags = ["high" if x > high else "low" if x < low else "" for x in ratio]
    return -ratio.clamp(low, high) * r.advantages * r.log_probs, flags


def sapo(r: Response, recipe: Recipe) -> tuple[Tensor, Flags]:
    tau = torch.tensor(
        [recipe.tau_positive if a > 0 else recipe.tau_negative for a in r.advantages], dtype=torch.float64
    )
    ratio = exp20(r.log_probs - old(r))
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * r.advantages, [""] * len(ratio)


def gmpo(r: Response, recipe: Recipe) -> tuple[Tensor, Flags]:
    low, high = math.log(1 - recipe.eps_low), math.log(1 + recipe.eps_high)
    bounded, flags = [], []
    for x, a in zip(r.log_probs - old(r), r.advantages, strict=True):
        bounded.append(x.clamp(max=high) if a > 0 else x.clamp(min=low))
        flags.append("high" if a > 0 and x > high else "low" if a < 0 and x < low else "")
    log_ratios = torch.stack(bounded)
    mean = log_ratios.sum() / len(log_ratios)
    if recipe.token_correction != "none":  # as gspo
        mean = shared(mean, log_ratios)
    return -r.advantages * exp20(mean), flags


def opmd(r: Response, recipe: Recipe) -> tuple[Tensor, Flags]:
    """-A logp(y) + τ/2 (logp(y) - old(y))² of the whole response, each token with its own part of the sums."""
    x = r.log_probs - old(r)
    distance = x.sum()
    squared = distance * x
    if recipe.token_correction != "none":  # as gspo
        squared = sg(distance) * (sg(x) + 2 * (x - sg(x)))
    return -r.advantages * r.log_probs + recipe.tau / 2 * squared, [""] * len(x)


LOSSES: dict[str, Callable[[Response, Recipe], tuple[Tensor, Flags]]] = {
    "ppo": ppo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "opmd": opmd,
}


def old(r: Response) -> Tensor:
    assert r.old is not None
    return r.old


# ----------------------------------------------------------------------------------- KL, corrections and normalisation


def k3(d: Tensor) -> Tensor:
    """The whole of d is clamped with the argument of exp: beyond it the gradient is 0."""
    d = d.clamp(-20.0, 20.0)
    return torch.expm1(d) - d


def kl(r: Response, recipe: Recipe) -> Tensor:
    """k2 or k3 of every token, unbiased form: k3 with the differentiable importance ratio, k2 with the detached one."""
    if not recipe.kl_coef:
        return torch.zeros_like(r.log_probs)
    assert r.reference is not None
    d = r.reference - r.log_probs
    w = exp20(r.log_probs - old(r)) if recipe.kl_unbiased else torch.ones_like(d)
    return w * k3(d) if recipe.kl == "k3" else sg(w) * d**2 / 2


def correct(r: Response, recipe: Recipe) -> tuple[Flags, Tensor]:
    """("", "rejected" or "rejected response", factor) of every token, by the off-policy corrections."""
    words, factor = [""] * len(r.log_probs), torch.ones(len(r.log_probs), dtype=torch.float64)
    if r.behaviour is None or not words:
        return words, factor
    log_rho = sg(old(r)) - r.behaviour
    rho, (low, high) = exp20(log_rho), recipe.token_bounds
    if recipe.token_correction == "tis":
        factor = rho.clamp(low, high)
    elif recipe.token_correction in ("icepop", "mis"):
        words = ["" if low <= x <= high else "rejected" for x in rho]
        if recipe.token_correction == "icepop":
            factor = rho
    if recipe.sequence_bounds is not None:
        low, high = recipe.sequence_bounds
        if not low <= float(exp20(log_rho.mean())) <= high:
            words = ["rejected response"] * len(words)
    return words, factor


def token_weights(counts: Sequence[int], recipe: Recipe) -> list[float]:
    """Of each token of each response."""
    tokens, sequences = sum(counts), sum(n > 0 for n in counts)

    def weight(n: int) -> float:
        if n == 0:
            return 0.0
        denominators = {
            "token_mean": tokens,
            "seq_mean_token_mean": n * sequences,
            "constant": sequences * recipe.max_length,
        }
        return 1.0 / denominators[recipe.normalisation]

    return [weight(n) for n in counts]


# ------------------------------------------------------------------------------------------------------------- metrics


def metrics(cut: Sequence[Response], flags: Sequence[Flags], recipe: Recipe) -> dict[str, float]:
    """Means over all trainable tokens, rejected ones included, or over all responses that have any, whatever the loss
    is normalised by."""
    with torch.no_grad():
        found = _of_tokens([r for r in cut if len(r.log_probs)], [flag for part in flags for flag in part], recipe)
        return {name: float(value) for name, value in found.items()} | _of_responses(cut, flags)


def _of_tokens(cut: list[Response], flags: Flags, recipe: Recipe) -> dict[str, Tensor | float]:
    if not cut:
        return {}
    logp, entropy = torch.cat([r.log_probs for r in cut]), torch.cat([r.entropy for r in cut])
    before = torch.cat([old(r) for r in cut])
    ratio = exp20(logp - before)
    found: dict[str, Tensor | float] = {
        "policy/entropy": entropy.mean(),
        "policy/clip_fraction": share(flags, "high", "low", "dual"),
        "policy/clip_fraction_high": share(flags, "high"),
        "policy/clip_fraction_low": share(flags, "low"),
        "policy/clip_fraction_dual": share(flags, "dual"),
        "policy/rejected_fraction": share(flags, "rejected", "rejected response"),
        "policy/ratio_mean": ratio.mean(),
        "policy/kl_old": k3(logp - before).mean(),
    }
    if recipe.loss in ("ppo", "cispo", "sapo"):  # with one ratio per token
        found["policy/ratio_above_fraction"] = (ratio > 1 + recipe.eps_high).double().mean()
        found["policy/ratio_below_fraction"] = (ratio < 1 - recipe.eps_low).double().mean()
    if all(r.reference is not None for r in cut):
        reference = torch.cat([r.reference for r in cut if r.reference is not None])
        found["policy/kl_reference"] = k3(reference - logp).mean()
    if all(r.behaviour is not None for r in cut):
        gap = before - torch.cat([r.behaviour for r in cut if r.behaviour is not None])
        rho = exp20(gap)
        found |= {"gap/mean_abs": gap.abs().mean(), "gap/max_abs": gap.abs().max(), "gap/kl_k3": k3(gap).mean()}
        found |= {"gap/rho_mean": rho.mean(), "gap/rho_max": rho.max()}
        found["gap/ess"] = rho.sum() ** 2 / (len(rho) * (rho**2).sum())
        found["gap/outside_fraction"] = ((rho < 0.8) | (rho > 1.25)).double().mean()
    return found


def _of_responses(cut: Sequence[Response], flags: Sequence[Flags]) -> dict[str, float]:
    live = [r for r in cut if len(r.log_probs)]
    if not live:
        return {}
    found = {
        "policy/clip_fraction_sequences": [share(part, "high", "low", "dual") for part in flags],
        "policy/rejected_fraction_sequences": [share(part, "rejected response") for part in flags],
        "policy/log_ratio_sequence_mean": [float((r.log_probs - old(r)).mean()) for r in live],
        "gap/log_rho_sequence_mean": [float((old(r) - r.behaviour).mean()) for r in live if r.behaviour is not None],
    }
    return {name: sum(values) / len(values) for name, values in found.items() if values}


def share(flags: Flags, *kinds: str) -> float:
    return sum(flag in kinds for flag in flags) / len(flags)


# ---------------------------------------------------------------------------------------------------------- advantages


def advantages(
    kind: str, rewards: Sequence[float], groups: Sequence[object], tokens: Sequence[int], **options: object
) -> list[float]:
    """One per sample. `options`: std (population, sample, none), shift_mean."""
    result, informative = [0.0] * len(rewards), [False] * len(rewards)
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group and math.isfinite(rewards[i])]
        r = [rewards[i] for i in members]
        if not r or (max(r) - min(r) <= 1e-6 and not (kind == "reinforce_pp" and len(r) == 1)):
            continue
        mean = sum(r) / len(r)
        for i, x in zip(members, r, strict=True):
            informative[i] = True
            if kind == "grpo":
                result[i] = (x - mean) / (_deviation(r, str(options.get("std", "population"))))
            elif kind in ("dr_grpo", "reinforce_pp_baseline"):
                result[i] = x - mean
            elif kind == "rloo":
                result[i] = x - (sum(r) - x) / (len(r) - 1)
            else:
                result[i] = x
    if not kind.startswith("reinforce_pp"):
        return result
    everything = [result[i] for i, n in enumerate(tokens) if informative[i] for _ in range(n)]  # one entry a token
    if len(everything) < 2:
        return [0.0] * len(rewards)
    mean = sum(everything) / len(everything)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in everything) / (len(everything) - 1) + 1e-8)
    shift = mean if options.get("shift_mean", True) else 0.0
    live = [informative[i] and tokens[i] > 0 for i in range(len(rewards))]
    return [(x - shift) / deviation if ok else 0.0 for x, ok in zip(result, live, strict=True)]


def _deviation(r: Sequence[float], std: str) -> float:
    if std == "none":
        return 1.0
    mean = sum(r) / len(r)
    return math.sqrt(sum((x - mean) ** 2 for x in r) / (len(r) - (std == "sample"))) + 1e-6
