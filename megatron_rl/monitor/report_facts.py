"""The words and numbers at the head of the report: what ran, what came out, what deserves a look. No drawing here."""

from __future__ import annotations

import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .health import HealthMonitor
from .metric_names import describe
from .progress import duration
from .report_data import RunData, Series
from .result import Interval

EDGE_STEPS = 5
"""Steps averaged at either end for 'first' and 'last' of a noisy metric."""


def run_facts(data: RunData) -> dict[str, Any]:
    """Name, status line and a list of (label, value) about the run."""
    config = data.config
    planned = _at(config, "steps")
    done = data.result is not None
    progress = f"step {data.last_step} of {planned}" if planned is not None else f"step {data.last_step}"
    chips = [
        ("model", _model_name(config)),
        ("algorithm", _at(config, "algorithm.preset")),
        ("layout", _layout(config)),
        ("routing replay", _replay(config)),
        ("batch", _batch(config)),
        ("learning rate", _at(config, "optimizer.lr")),
        ("seed", _at(config, "seed")),
        ("started", _when(data.started)),
    ]
    return {
        "name": str(_at(config, "name") or data.run_dir.resolve().name),
        "status": f"finished, {progress}" if done else f"in progress or stopped, {progress}",
        "finished": done,
        "updated": _when(data.updated),
        "chips": [(label, str(value)) for label, value in chips if value not in (None, "")],
    }


def headline(data: RunData) -> dict[str, Any]:
    """`pass_at_1` (before, after, intervals, verdict) or None, and the smaller tiles (label, value, note)."""
    return {"pass_at_1": _pass_at_1(data), "tiles": [tile for tile in _tiles(data) if tile is not None]}


def health_lines(data: RunData) -> list[dict[str, str]]:
    """The health rules replayed over the recorded metrics: `{level, step, text}` in order."""
    updates, loss = (_at(data.config, f"algorithm.{key}") for key in ("updates_per_batch", "loss"))
    monitor = HealthMonitor(updates_per_batch=updates if isinstance(updates, int) else 1, loss=str(loss or "ppo"))
    rows: dict[int, dict[str, float | None]] = {}
    for name, series in data.series.items():
        if not name.startswith("sft/"):
            for step, value in zip(series.x, series.y, strict=True):
                rows.setdefault(step, {})[name] = value
    said = ((step, line) for step in sorted(rows) for line in monitor.observe(step, rows[step]))
    return [{"level": line.split(" ", 1)[0], "step": str(step), "text": line.split(" ", 1)[1]} for step, line in said]


def metric_rows(data: RunData) -> list[dict[str, str]]:
    """One row per recorded metric for the table of all metrics."""
    rows = []
    for name in sorted(data.series):
        series, info = data.series[name], describe(name)
        values = [value for value in series.y if value is not None]
        rows.append(
            {
                "name": name,
                "meaning": info.meaning if info else "",
                "unit": info.unit if info else "",
                "denominator": info.denominator if info else "",
                "first": _short(series.first),
                "last": _short(series.last),
                "low": _short(min(values, default=None)),
                "high": _short(max(values, default=None)),
            }
        )
    return rows


def _pass_at_1(data: RunData) -> dict[str, Any] | None:
    series, low, high = (data.get(f"eval/pass_at_1{end}") for end in ("", "_low", "_high"))
    result = data.result
    if result is not None and result.pass_at_1_before is not None and result.pass_at_1_after is not None:
        before, before_interval = result.pass_at_1_before, result.pass_at_1_before_interval
        after, after_interval = result.pass_at_1_after, result.pass_at_1_after_interval
    elif series.first is not None and series.last is not None:
        before, before_interval = series.first, _ends(low.first, high.first)
        after, after_interval = series.last, _ends(low.last, high.last)
    else:
        return None
    only_one = result is None and len(series.x) == 1
    labels = ("before", "after") if result is not None else ("first", "latest")
    rows = [_bar(labels[0], before, before_interval), _bar(labels[1], after, after_interval)]
    return {
        "rows": rows[:1] if only_one else rows,
        "before": f"{before:.3f}",
        "after": None if only_one else f"{after:.3f}",
        "verdict": "evaluated once so far" if only_one else _verdict(before, after, before_interval, after_interval),
    }


def _bar(label: str, value: float, interval: Interval | None) -> dict[str, Any]:
    low, high = interval or (value, value)
    return {
        "label": label,
        "value": f"{value:.3f}",
        "interval": f"{low:.3f} to {high:.3f}" if interval else "",
        "x": round(100 * value, 2),
        "low": round(100 * low, 2),
        "width": round(100 * (high - low), 2),
    }


def _verdict(before: float, after: float, one: Interval | None, two: Interval | None) -> str:
    factor = f"{after / before:.1f} times as many right answers" if before > 0 and after > before else ""
    if one is None or two is None:
        return factor
    apart = one[1] < two[0] or two[1] < one[0]
    certain = "the 95 % intervals do not overlap" if apart else "the 95 % intervals overlap: this may be chance"
    return f"{factor}; {certain}" if factor and apart else certain


def _tiles(data: RunData) -> list[dict[str, str] | None]:
    steps = data.get("time/step")
    times = [value for value in steps.y if value is not None]
    step_time = _tile("step time", f"{statistics.median(times):.2f} s", _largest_phase(data)) if times else None
    speed = [value for value in data.get("system/tokens_per_second").y if value is not None]
    throughput = _tile("throughput", f"{statistics.median(speed):,.0f}", "trained tokens per second") if speed else None
    seconds = data.result.train_seconds if data.result else None
    if seconds is None and data.started is not None and data.updated is not None:
        seconds = data.updated - data.started
    trained = _tile("training time", duration(seconds), f"{data.last_step} steps") if seconds else None
    return [
        _change("training reward", data.get("reward/mean")),
        _change("valid format, held out", data.get("eval/format_valid"), edge=1),
        _change("response length", data.get("rollout/response_length_mean"), digits=1),
        trained,
        step_time,
        throughput,
    ]


def _tile(label: str, value: str, note: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "note": note}


def _change(label: str, series: Series, *, digits: int = 2, edge: int = EDGE_STEPS) -> dict[str, str] | None:
    values = [value for value in series.y if value is not None]
    if not values:
        return None
    edge = max(1, min(edge, len(values) // 2))
    first, last = statistics.fmean(values[:edge]), statistics.fmean(values[-edge:])
    note = f"from {first:.{digits}f}" + (f" (means of {edge} steps)" if edge > 1 else "")
    return _tile(label, f"{last:.{digits}f}", note if len(values) > 1 else "")


def _largest_phase(data: RunData) -> str:
    sums = {
        name.split("/", 1)[1]: sum(value or 0.0 for value in series.y)
        for name, series in data.series.items()
        if name.startswith("time/") and name != "time/step"
    }
    total = sum(value or 0.0 for value in data.get("time/step").y)
    if not sums or not total:
        return "median"
    name = max(sums, key=lambda key: sums[key])
    return f"median; {sums[name] / total:.0%} of it {name.replace('_', ' ')}"


def _at(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _model_name(config: dict[str, Any]) -> str:
    path = _at(config, "model.path")
    parts = Path(str(path)).parts if path else ()
    return "/".join(parts[-2:] if parts[-1:] == ("model",) else parts[-1:])


def _layout(config: dict[str, Any]) -> str:
    keys = {"TP": "tensor_model", "PP": "pipeline_model", "CP": "context", "DP": "data"}
    experts = {"EP": "expert_model", "ETP": "expert_tensor"}  # the same ranks, shared otherwise

    def shown(names: dict[str, str]) -> str:
        sizes = [(short, _at(config, f"parallel.{key}_parallel_size")) for short, key in names.items()]
        return " × ".join(f"{short} {n}" for short, n in sizes if n is not None and (n != 1 or short in ("TP", "DP")))

    return ", experts ".join(filter(None, map(shown, (keys, experts))))


def _replay(config: dict[str, Any]) -> str:
    """Of a model with experts; what is not one has neither replay nor experts to share."""
    mode = str(_at(config, "moe.routing_replay") or "off")
    has_experts = _at(config, "engine.routed_experts") or (_at(config, "parallel.expert_model_parallel_size") or 1) > 1
    return mode if mode != "off" or has_experts else ""


def _batch(config: dict[str, Any]) -> str:
    groups, size = _at(config, "rollout.groups_per_step"), _at(config, "rollout.group_size")
    return f"{groups} prompts × {size} samples" if groups and size else ""


def _when(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _ends(low: float | None, high: float | None) -> Interval | None:
    return None if low is None or high is None else (low, high)


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
