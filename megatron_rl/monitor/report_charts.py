"""Turns the charts of `report_catalogue` and the phase times into plotly traces. Data in, plain dictionaries out.

Colours are names ("c0", "band0") that the page resolves, so that one description serves light and dark. A chart without
data is left out, and what is left out is named.
"""

from __future__ import annotations

import math
import re
import statistics
from typing import Any

from .metric_names import describe
from .progress import PHASES
from .report_catalogue import CHARTS, Chart, Line
from .report_data import RunData, Series

SMOOTH_FROM = 40
"""Points from which a noisy line is drawn thin, with its moving average on top."""
MAX_POINTS = 1200
"""Points of one line at most: more than a screen is wide only makes the page slow."""
MAX_BARS = 120
"""Bars of one chart at most; each is then the mean over several steps."""
PHASE_ORDER = tuple(PHASES)
PHASE_TITLE = "Where the time goes"
PHASE_HEALTHY = (
    "Generation and training dominate and stay level; a phase that grows step by step is the one to look into."
)
SHORT_RUN = 8
"""Runs of fewer steps get a tick at each."""


def build_charts(data: RunData) -> tuple[list[dict[str, Any]], list[str]]:
    """The charts that have data, as dictionaries for the page, and the titles of those that have none."""
    charts, missing = [], []
    for chart in CHARTS:
        wanted = chart.lines(data) if callable(chart.lines) else chart.lines
        lines = [line for line in wanted if _has_data(line, data)]
        if lines:
            charts.append(_drawn(chart, lines, data))
        else:
            missing.append(chart.title)
    phases = _phase_chart(data)
    if phases is None:
        return charts, [*missing, PHASE_TITLE]
    speed = next((i for i, chart in enumerate(charts) if chart["section"] == "Speed"), len(charts))
    return [*charts[:speed], phases, *charts[speed:]], missing


def _has_data(line: Line, data: RunData) -> bool:
    series = data.get(line.metric)
    return bool(series) and not (line.unless_zero and not any(series.y))


def _drawn(chart: Chart, lines: list[Line], data: RunData) -> dict[str, Any]:
    traces = [trace for line in lines for trace in _traces(line, data, chart)]
    axis = _axis(chart.y, chart.y_format, chart.y_at_least)
    if chart.y_range is not None:
        axis |= {"range": [chart.y_range[0] - 0.02, chart.y_range[1] + 0.02]}
    decades = _decades([trace["y"] for trace in traces]) if chart.y_log else None
    if decades is not None:
        axis |= {"type": "log", "range": decades, "dtick": 1}
    layout: dict[str, Any] = {"yaxis": axis, "xaxis": _step_axis(chart.x, [x for trace in traces for x in trace["x"]])}
    if any(line.right for line in lines):
        layout["yaxis2"] = _axis(chart.right, chart.right_format, chart.right_at_least) | {"tickmode": "auto"}
    card = _card(chart.section, chart.title, chart.healthy, [line.metric for line in lines], traces, layout)
    # A line that is alone because others have no data still needs its name.
    return card | {"legend": card["legend"] or (not callable(chart.lines) and len(chart.lines) > 1)}


def _step_axis(title: str, steps: list[float]) -> dict[str, Any]:
    """Whole steps only: left alone, plotly divides a short run into halves and rounds their labels to repeats."""
    short = bool(steps) and max(steps) - min(steps) < SHORT_RUN
    return {"title": {"text": title}, **({"dtick": 1} if short else {})}


def _axis(title: str, tick_format: str, at_least: float | None) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": title}, "tickformat": tick_format, "rangemode": "tozero"}
    return axis if at_least is None else axis | {"autorangeoptions": {"include": at_least}}


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
    full = data.get(line.metric)
    series = thinned(full)
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
    if line.markers or line.dash != "solid" or len(full.x) < SMOOTH_FROM:
        return [*band, trace]
    raw = trace | {"showlegend": False, "opacity": 0.35, "line": {"color": f"c{line.color}", "width": 1}}
    smooth = thinned(Series(full.x, moving_average(full)))
    return [*band, raw, trace | {"y": smooth.y, "hoverinfo": "skip", "hovertemplate": None}]


def _band(line: Line, data: RunData) -> list[dict[str, Any]]:
    assert line.band is not None
    low, high = (thinned(data.get(name)) for name in line.band)
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


def thinned(series: Series) -> Series:
    """Every n-th point of a long series, its last one always included, in six significant digits."""
    stride = max(1, -(-len(series.x) // MAX_POINTS))
    kept = series.y[::-1][::stride][::-1]
    return Series(series.x[::-1][::stride][::-1], [None if value is None else float(f"{value:.6g}") for value in kept])


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
    columns = {name: _bars(total.x, data.get(f"time/{name}")) for name in names}
    whole = _bars(total.x, total)
    columns["other"] = [max(0.0, total - sum(parts)) for total, *parts in zip(whole, *columns.values(), strict=True)]
    steps = [steps[-1] for steps in _buckets(total.x)]
    traces = [
        {
            "type": "bar",
            "name": name.replace("_", " "),
            "x": steps,
            "y": [round(value, 4) for value in seconds],
            "marker": {"color": _phase_color(name), "line": {"width": 0}},
            "hovertemplate": "%{y:.2f} s",
        }
        for name, seconds in columns.items()
        if any(seconds)
    ]
    layout: dict[str, Any] = {
        "yaxis": {"title": {"text": "seconds"}},
        "xaxis": {"title": {"text": "step"}},
        "barmode": "stack",
    }
    metrics = ["time/step", *(f"time/{name}" for name in names)]
    return _card("Speed", PHASE_TITLE, PHASE_HEALTHY, metrics, traces, layout | {"bargap": 0.15})


def _buckets(steps: list[int]) -> list[list[int]]:
    """The steps cut into at most MAX_BARS runs of equal length (the last may be shorter)."""
    size = max(1, -(-len(steps) // MAX_BARS))
    return [steps[i : i + size] for i in range(0, len(steps), size)]


def _bars(steps: list[int], series: Series) -> list[float]:
    """Mean seconds per step in each bucket; a phase that a step did not have counts as 0."""
    known = dict(zip(series.x, series.y, strict=True))
    return [sum(known.get(step) or 0.0 for step in bucket) / len(bucket) for bucket in _buckets(steps)]


def _phase_color(name: str) -> str:
    """The same phase has the same colour in every report; unknown ones share one, and the rest is grey."""
    if name == "other":
        return "c5"
    return f"s{PHASE_ORDER.index(name) if name in PHASE_ORDER else len(PHASE_ORDER)}"
