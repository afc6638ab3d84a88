"""Which charts the report has, of which metrics, and what healthy looks like in each; drawing is in `report_charts`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from .report_data import RunData


@dataclass(frozen=True)
class Line:
    """One metric as a line; `band` names the metrics of its lower and upper end."""

    metric: str
    label: str
    color: int = 0
    band: tuple[str, str] | None = None
    right: bool = False
    """Drawn against the right axis."""
    markers: bool = False
    """Sparse points (evaluations) that deserve a mark each; never smoothed."""
    dash: str = "solid"
    unless_zero: bool = False
    """Left out while it is 0 throughout (a feature that is off)."""


Lines = tuple[Line, ...]


@dataclass(frozen=True)
class Chart:
    """One chart: `lines` or a function that finds them in the run (their number depends on the run)."""

    section: str
    title: str
    healthy: str
    lines: Lines | Callable[[RunData], Lines]
    y: str = ""
    y_format: str = ""
    y_range: tuple[float, float] | None = None
    y_log: bool = False
    y_at_least: float | None = None
    """The axis reaches this value even when the data does not, so that noise near zero looks small."""
    right: str = ""
    right_format: str = ""
    right_at_least: float | None = None
    x: str = "step"


def _pass_at_k(data: RunData) -> Lines:
    ks = sorted(int(m[1]) for name in data.series if (m := re.fullmatch(r"eval/pass_at_(\d+)", name)))
    lines = [Line(f"eval/pass_at_{k}", f"pass@{k}", i, markers=True) for i, k in enumerate(ks[:6])]
    return tuple(lines) if len(ks) > 1 else ()


def _components(data: RunData) -> Lines:
    known = ("mean", "std", "std_within_group", "min", "max", "correctness", "errors")
    names = sorted(name for name in data.series if name.startswith("reward/") and name.split("/", 1)[1] not in known)
    return tuple(Line(name, name.split("/", 1)[1], i % 6) for i, name in enumerate(names)) if len(names) > 1 else ()


def _warm_up(data: RunData) -> Lines:
    plain = ("sft/step", "sft/loss", "sft/grad_norm", "sft/lr", "sft/tokens")
    checks = [name for name in data.series if name.startswith("sft/") and name not in plain]
    shares = [name for name in checks if all(v is None or 0 <= v <= 1 for v in data.get(name).y)]
    names = [(name, name.split("/", 1)[1].replace("_", " ")) for name in shares[:3]]
    extra = [Line(name, label, i + 1, right=True, markers=True) for i, (name, label) in enumerate(names)]
    return (Line("sft/loss", "loss", 0), *extra)


PASS_BAND = ("eval/pass_at_1_low", "eval/pass_at_1_high")
CHARTS: tuple[Chart, ...] = (
    Chart(
        "Learning",
        "Reward",
        "Rises and levels off. A total that climbs while correctness does not is being earned by form alone.",
        (Line("reward/correctness", "correctness", 0), Line("reward/mean", "total reward", 1)),
        "mean over samples",
    ),
    Chart(
        "Learning",
        "Held-out pass@1",
        "Rises with the training reward; the band is the 95 % interval. A plateau while the reward climbs is "
        "over-fitting.",
        (Line("eval/pass_at_1", "pass@1", 0, band=PASS_BAND, markers=True),),
        "share right",
        y_range=(0, 1),
    ),
    Chart(
        "Learning",
        "Held-out pass@k",
        "All curves rise. pass@1 catching up while the others stand still means sharper, not more able.",
        _pass_at_k,
        "share solved",
        y_range=(0, 1),
    ),
    Chart(
        "Learning",
        "Reward components",
        "Every part rises or stays high. One that rises at the cost of another is worth a look at samples.",
        _components,
        "mean, unweighted",
    ),
    Chart(
        "Learning",
        "Supervised warm-up",
        "The loss falls smoothly and the check reaches its target before reinforcement starts.",
        _warm_up,
        "loss (nats per token)",
        right="check",
        x="warm-up step",
    ),
    Chart(
        "Responses",
        "Response length and truncation",
        "Length drifts slowly; only a few per cent hit the limit. Both rising together means the limit is too low.",
        (
            Line("rollout/response_length_mean", "mean length", 0),
            Line("rollout/truncated_fraction", "truncated", 1, right=True),
        ),
        "tokens",
        right="share truncated",
        right_format=".0%",
        right_at_least=0.1,
    ),
    Chart(
        "Responses",
        "Entropy",
        "Falls slowly and stays above zero (0.1 to 1 is usual). A quick fall ends exploration; growth is drift.",
        (Line("policy/entropy", "entropy", 0),),
        "nats per token",
    ),
    Chart(
        "Responses",
        "Groups without a signal",
        "10 to 30 % is usual. Towards 100 % the prompts are all too easy or all too hard, and generation is wasted.",
        (
            Line("rollout/groups_dropped_fraction", "dropped", 0),
            Line("rollout/sample_rounds", "sampling rounds", 5, right=True, dash="dot"),
        ),
        "share of groups",
        ".0%",
        right="rounds",
    ),
    Chart(
        "Responses",
        "Age of tokens",
        "Weight versions that tokens are behind when they are trained on; rollout.max_staleness is the usual limit. "
        "Groups dropped for age (right) are mostly long ones: few is healthy.",
        (
            Line("rollout/staleness_mean", "mean", 0),
            Line("rollout/staleness_max", "largest", 1, dash="dot"),
            Line("rollout/stale_dropped_fraction", "groups dropped", 5, right=True, unless_zero=True),
        ),
        "versions behind",
        right="share of groups",
        right_format=".0%",
    ),
    Chart(
        "Updates",
        "Clip fraction",
        "Near zero with one update per batch; with several, 5 to 15 % (cispo near zero). gspo's bounds are narrow: "
        "about 15 %, with experts up to nearly all (docs/moe.md). Growth means the policy moves too fast.",
        (
            Line("policy/clip_fraction_high", "clipped high", 0),
            Line("policy/clip_fraction_low", "clipped low", 1),
            Line("policy/clip_fraction_dual", "dual clip", 3, unless_zero=True),
        ),
        "share of tokens",
        ".1%",
        y_at_least=0.02,
    ),
    Chart(
        "Updates",
        "Gradient norm and learning rate",
        "The norm is steady, 0.1 to 1 is usual. Spikes that grow ask for a lower learning rate.",
        (
            Line("optimizer/grad_norm", "gradient norm", 0),
            Line("optimizer/lr", "learning rate", 5, right=True, dash="dot"),
        ),
        "norm before clipping",
        right="learning rate",
        right_format=".1e",
    ),
    Chart(
        "Updates",
        "KL divergence",
        "To the reference: grows slowly, above 0.5 is far away. To the old policy: small and flat.",
        (Line("policy/kl_reference", "to the reference", 0), Line("policy/kl_old", "to the old policy", 1)),
        "nats per token",
    ),
    Chart(
        "Updates",
        "Gap between trainer and engine",
        "Flat: about 0.01 in bfloat16, below 0.0001 in float32. Growth means the engine misses updates.",
        (Line("gap/mean_abs", "mean", 0), Line("gap/max_abs", "largest", 5)),
        "|log-prob difference|",
        ".0e",
        y_log=True,
    ),
    Chart(
        "Updates",
        "Off-policy correction",
        "The effective sample size stays near 100 %, few tokens are far from the engine's probability, fewer rejected.",
        (
            Line("gap/ess", "effective sample size", 0, right=True),
            Line("gap/outside_fraction", "ratio outside 0.8 to 1.25", 1),
            Line("policy/rejected_fraction", "rejected", 3, unless_zero=True),
        ),
        "share of tokens",
        ".1%",
        y_at_least=0.01,
        right="share of tokens",
        right_format=".0%",
    ),
    Chart(
        "Experts",
        "Routing mismatch",
        "Some per cent, and flat. Growth between engine and trainer means that they compute differently; between old "
        "and current it is 0 with one update per batch.",
        (
            Line("routing/mismatch_engine", "engine and trainer", 0),
            Line("routing/mismatch_engine_max", "in the worst sequence", 5, dash="dot"),
            Line("routing/mismatch_old", "old and current", 1, unless_zero=True),
        ),
        "share of (token, layer)",
        ".1%",
        y_at_least=0.02,
    ),
    Chart(
        "Experts",
        "Load of experts",
        "Flat, whatever its level: nothing balances it during RL. A rising maximum and dead experts are a router that "
        "collapses.",
        (
            Line("routing/load_max_over_mean", "fullest over mean expert", 0),
            Line("routing/dead_experts", "dead experts", 3, right=True, unless_zero=True),
        ),
        "ratio, mean over layers",
        right="share of experts",
        right_format=".0%",
    ),
    Chart(
        "Speed",
        "Throughput",
        "Steady. A slow decline usually follows growing responses.",
        (Line("system/tokens_per_second", "trained tokens per second", 0),),
        "tokens/s",
        "~s",
    ),
    Chart(
        "Speed",
        "Engines",
        "All of them, all the time; the controller's log has the reason of each outage.",
        (
            Line("system/engines_serving", "serving, the fewest during a step", 0),
            Line("system/engine_restarts", "started again", 5, unless_zero=True),
        ),
        "engines",
        "~s",
    ),
)
