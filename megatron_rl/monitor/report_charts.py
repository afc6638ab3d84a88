"""The charts of the report: which metrics, how they are drawn, and what healthy looks like. Data in, plotly traces out.

A chart is described by a `Chart` and becomes a plain dictionary for plotly.js. Colours are names ("c0", "band0") that
the page resolves, so that one description serves light and dark. A chart without data is left out.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .metric_names import describe
from .report_data import RunData, Series

SMOOTH_FROM = 40
"""Points from which a noisy line is drawn thin, with its moving average on top."""
MAX_BARS = 240


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
    right: str = ""
    right_format: str = ""
    x: str = "step"


def _pass_at_k(data: RunData) -> Lines:
    ks = sorted(int(m[1]) for name in data.series if (m := re.fullmatch(r"eval/pass_at_(\d+)", name)))
    lines = [Line(f"eval/pass_at_{k}", f"pass@{k}", i, markers=True) for i, k in enumerate(ks[:6])]
    return tuple(lines) if len(ks) > 1 else ()


def _components(data: RunData) -> Lines:
    known = ("mean", "std", "std_within_group", "min", "max", "correctness", "errors")
    names = [name for name in data.series if name.startswith("reward/") and name.split("/", 1)[1] not in known]
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
        "Updates",
        "Clip fraction",
        "5 to 15 % with several updates per batch, near zero with one. Above 30 % the policy moves too fast.",
        (
            Line("policy/clip_fraction_high", "clipped high", 0),
            Line("policy/clip_fraction_low", "clipped low", 1),
            Line("policy/clip_fraction_dual", "dual clip", 3),
        ),
        "share of tokens",
        ".1%",
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
        "Speed",
        "Throughput",
        "Steady. A slow decline usually follows growing responses.",
        (Line("system/tokens_per_second", "trained tokens per second", 0),),
        "tokens/s",
        "~s",
    ),
)
PHASE_ORDER = ("generate", "pull", "log_probs", "train", "weights", "eval", "checkpoint")
PHASE_TITLE = "Where the time goes"
PHASE_HEALTHY = (
    "Generation and training dominate and stay level; a phase that grows step by step is the one to look into."
)


def build_charts(data: RunData) -> tuple[list[dict[str, Any]], list[str]]:
    """The charts that have data, as dictionaries for the page, and the titles of those that have none."""
    charts, missing = [], []
    for chart in CHARTS:
        lines = [
            line for line in (chart.lines(data) if callable(chart.lines) else chart.lines) if data.get(line.metric)
        ]
        if lines:
            charts.append(_drawn(chart, lines, data))
        else:
            missing.append(chart.title)
    phases = _phase_chart(data)
    if phases is None:
        return charts, [*missing, PHASE_TITLE]
    speed = next((i for i, chart in enumerate(charts) if chart["section"] == "Speed"), len(charts))
    return [*charts[:speed], phases, *charts[speed:]], missing


def _drawn(chart: Chart, lines: list[Line], data: RunData) -> dict[str, Any]:
    traces = [trace for line in lines for trace in _traces(line, data, chart)]
    axis: dict[str, Any] = {"title": {"text": chart.y}, "tickformat": chart.y_format, "rangemode": "tozero"}
    if chart.y_range is not None:
        axis |= {"range": [chart.y_range[0] - 0.02, chart.y_range[1] + 0.02]}
    decades = _decades([trace["y"] for trace in traces]) if chart.y_log else None
    if decades is not None:
        axis |= {"type": "log", "range": decades, "dtick": 1}
    layout: dict[str, Any] = {"yaxis": axis, "xaxis": {"title": {"text": chart.x}}}
    if any(line.right for line in lines):
        right = {"title": {"text": chart.right}, "tickformat": chart.right_format, "rangemode": "tozero"}
        layout["yaxis2"] = right | {"tickmode": "auto"}
    return _card(chart.section, chart.title, chart.healthy, [line.metric for line in lines], traces, layout)


def _decades(columns: list[list[float | None]]) -> list[int] | None:
    """Whole powers of ten around all positive values; None without any (exact zeros belong on a linear axis)."""
    values = [value for column in columns for value in column if value is not None and value > 0]
    if not values:
        return None
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return [low, max(high, low + 1)]


def _card(
    section: str, title: str, healthy: str, metrics: list[str], traces: list[dict[str, Any]], layout: dict[str, Any]
) -> dict[str, Any]:
    infos = [(name, describe(name)) for name in metrics]
    about = [
        f"{name}: {info.meaning} ({info.unit}; over {info.denominator})" for name, info in infos if info is not None
    ]
    return {
        "id": re.sub(r"\W+", "-", title.lower()),
        "section": section,
        "title": title,
        "healthy": healthy,
        "about": about,
        "traces": traces,
        "layout": layout,
        "legend": sum(trace.get("showlegend", True) for trace in traces) > 1,
    }


def _traces(line: Line, data: RunData, chart: Chart) -> list[dict[str, Any]]:
    series = data.get(line.metric)
    unit = chart.right_format if line.right else chart.y_format
    trace: dict[str, Any] = {
        "type": "scatter",
        "name": line.label,
        "x": series.x,
        "y": series.y,
        "mode": "lines+markers" if line.markers or len(series.x) == 1 else "lines",
        "line": {"color": f"c{line.color}", "width": 2, "dash": line.dash},
        "marker": {"color": f"c{line.color}", "size": 6},
        "hovertemplate": f"%{{y:{unit or '.4~g'}}}",
        "connectgaps": line.markers,
    }
    if line.right:
        trace["yaxis"] = "y2"
    band = _band(line, data) if line.band else []
    if line.markers or line.dash != "solid" or len(series.x) < SMOOTH_FROM:
        return [*band, trace]
    raw = trace | {"showlegend": False, "opacity": 0.35, "line": {"color": f"c{line.color}", "width": 1}}
    average = trace | {"y": moving_average(series), "hoverinfo": "skip", "hovertemplate": None}
    return [*band, raw, average]


def _band(line: Line, data: RunData) -> list[dict[str, Any]]:
    assert line.band is not None
    low, high = (data.get(name) for name in line.band)
    if not low or not high:
        return []
    edge = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "showlegend": False}
    return [
        edge | {"x": low.x, "y": low.y, "name": "95 % low", "hovertemplate": "%{y:.3f}", "marker": {"color": "c5"}},
        edge
        | {
            "x": high.x,
            "y": high.y,
            "name": "95 % high",
            "fill": "tonexty",
            "fillcolor": f"band{line.color}",
            "hovertemplate": "%{y:.3f}",
            "marker": {"color": "c5"},
        },
    ]


def moving_average(series: Series, share: float = 0.025) -> list[float | None]:
    """Mean over a window centred on each point, `share` of all points (2 at least) to either side; None does not enter.

    Centred, because a page drawn afterwards knows both sides and a trailing average would lag behind every rise.
    """
    half = max(2, round(share * len(series.y)))
    windows = (series.y[max(0, i - half) : i + half + 1] for i in range(len(series.y)))
    known = ([value for value in window if value is not None] for window in windows)
    return [statistics.fmean(values) if values else None for values in known]


def _phase_chart(data: RunData) -> dict[str, Any] | None:
    total = data.get("time/step")
    names = [name.split("/", 1)[1] for name in data.series if name.startswith("time/") and name != "time/step"]
    if not total or not names:
        return None
    names.sort(key=lambda name: (PHASE_ORDER.index(name) if name in PHASE_ORDER else len(PHASE_ORDER), name))
    steps = total.x[:: max(1, -(-len(total.x) // MAX_BARS))]
    known = {name: dict(zip(data.get(f"time/{name}").x, data.get(f"time/{name}").y, strict=True)) for name in names}
    whole = dict(zip(total.x, total.y, strict=True))
    rest = [max(0.0, (whole[s] or 0.0) - sum(known[name].get(s) or 0.0 for name in names)) for s in steps]
    columns = [(name.replace("_", " "), [known[name].get(s) or 0.0 for s in steps]) for name in names]
    traces = [
        {
            "type": "bar",
            "name": name,
            "x": steps,
            "y": seconds,
            "marker": {"color": _phase_color(name), "line": {"width": 0}},
            "hovertemplate": "%{y:.2f} s",
        }
        for name, seconds in [*columns, ("other", rest)]
        if any(seconds)
    ]
    layout: dict[str, Any] = {
        "yaxis": {"title": {"text": "seconds"}},
        "xaxis": {"title": {"text": "step"}},
        "barmode": "stack",
    }
    metrics = ["time/step", *(f"time/{name}" for name in names)]
    return _card("Speed", PHASE_TITLE, PHASE_HEALTHY, metrics, traces, layout | {"bargap": 0.15})


def _phase_color(name: str) -> str:
    """The same phase has the same colour in every report; unknown ones share one, and the rest is grey."""
    known = [phase.replace("_", " ") for phase in PHASE_ORDER]
    return f"s{known.index(name)}" if name in known else "c5" if name == "other" else f"s{len(known)}"
