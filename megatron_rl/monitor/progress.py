"""What a run shows on the terminal while it goes on, and the table it ends with. Reads metrics, computes none.

On a terminal: a few lines that stay in place (stage, bar, what is happening now, the latest numbers), with everything
else that is printed scrolling above them. Anywhere else, and with `plain`: one line a step. Rank 0 only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from .metrics import MetricValue
from .result import Interval, RunResult

Mode = Literal["auto", "rich", "plain", "quiet"]

SHOWN: tuple[tuple[str, str, str], ...] = (
    ("reward/mean", "reward", "{:.3f}"),
    ("rollout/response_length_mean", "length", "{:.1f}"),
    ("policy/entropy", "entropy", "{:.3f}"),
    ("system/tokens_per_second", "tok/s", "{:,.0f}"),
    ("sft/loss", "loss", "{:.4f}"),
    ("sft/format_valid", "format valid", "{:.2f}"),
)
"""Metric, its label, how its value is printed; pass@1 is added with its interval and the step it was measured at."""

PHASES = {
    "generate": "generating",
    "pull": "fetching the batch",
    "log_probs": "log-probabilities",
    "train": "training",
    "weights": "updating the engines",
    "eval": "evaluating",
    "checkpoint": "writing a checkpoint",
}


class Progress:
    """The display of one run, from its making until `close`."""

    def __init__(
        self,
        title: str,
        *,
        mode: Mode = "auto",
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`auto` is `rich` on a terminal that can move its cursor and `plain` elsewhere; NO_COLOR is obeyed by rich."""
        self._console = console or Console(highlight=False)
        capable = self._console.is_terminal and not self._console.is_dumb_terminal
        self._mode = ("rich" if capable else "plain") if mode == "auto" else mode
        self._clock = clock
        self._title = title
        self._stage, self._done = "starting", 0
        self._total: int | None = None
        self._phase = ""
        self._began = self._stage_began = clock()
        self._last_step_at: float | None = None
        self._durations: deque[float] = deque(maxlen=20)
        self._latest: dict[str, float] = {}
        self._evaluated_at: int | None = None
        self._spinner = Spinner("dots", style="cyan")
        # Transient: what stays behind is the last line of each stage and the closing table, not a frozen bar.
        self._live = Live(self, console=self._console, refresh_per_second=5, transient=True)
        if self._mode == "rich":
            self._live.start()

    def close(self) -> None:
        """Take the live lines away; allowed more than once."""
        self._live.stop()

    def stage(self, name: str, total: int | None = None, done: int = 0) -> None:
        """Begin a stage of `total` steps (None: unknown), `done` of which an earlier run already did."""
        self._stage, self._total, self._done, self._phase = name, total, done, ""
        self._stage_began = self._clock()
        self._last_step_at = None
        self._durations.clear()
        self._latest = {key: value for key, value in self._latest.items() if not key.startswith("sft/")}
        if self._mode != "quiet":
            text = Text(f"{name}: {total} steps" if total is not None else name, style="bold")
            self._console.print(text, soft_wrap=True)

    def phase(self, name: str) -> None:
        """Say what is happening now; `name` as in the `time/<name>` metrics, or free text."""
        self._phase = PHASES.get(name, name)

    def step(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Step `step` of the stage is done with these metrics."""
        now = self._clock()
        self._durations.append(now - (self._last_step_at if self._last_step_at is not None else self._stage_began))
        self._last_step_at, self._done = now, step
        self.values(step, metrics)
        if self._mode == "plain":
            self._console.print(self._line(), soft_wrap=True)

    def values(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        """Show these numbers without ending a step, such as the evaluation before the first one."""
        self._latest.update({name: value for name, value in metrics.items() if value is not None})
        if metrics.get("eval/pass_at_1") is not None:
            self._evaluated_at = step

    def note(self, text: str) -> None:
        """Print a line that stays, above the live ones; lines beginning with WARNING or INFO are coloured."""
        if self._mode != "quiet":
            style = "yellow" if text.startswith("WARNING") else "cyan" if text.startswith("INFO") else ""
            self._console.print(Text(text, style=style), soft_wrap=True)

    def summary(self, result: RunResult) -> None:
        """End the live display and print the table of before and after."""
        self.close()
        if self._mode != "quiet":
            self._console.print(summary_table(result, self._title))

    def eta_seconds(self) -> float | None:
        """Remaining seconds of this stage at the pace of its last 20 steps; None while unknown."""
        if self._total is None or not self._durations:
            return None
        return max(0, self._total - self._done) * sum(self._durations) / len(self._durations)

    def _numbers(self) -> list[tuple[str, str]]:
        shown = [(label, form.format(self._latest[name])) for name, label, form in SHOWN if name in self._latest]
        if "eval/pass_at_1" in self._latest:
            low, high = self._latest.get("eval/pass_at_1_low"), self._latest.get("eval/pass_at_1_high")
            interval = "" if low is None or high is None else f"{_interval((low, high))} "
            text = f"{self._latest['eval/pass_at_1']:.3f} {interval}@{self._evaluated_at}"
            shown.insert(1 if shown and shown[0][0] == "reward" else 0, ("pass@1", text))
        return shown

    def _line(self) -> str:
        """The one line of a step in plain mode."""
        count = f"{self._done}/{self._total}" if self._total is not None else f"{self._done}"
        parts = [f"{self._stage} {count}", *(f"{label} {value}" for label, value in self._numbers())]
        parts.append(f"{self._durations[-1]:.1f} s")
        eta = self.eta_seconds()
        return "  ".join([*parts, f"ETA {duration(eta)}"] if eta is not None else parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The live lines, fitted to the width at hand."""
        width = options.max_width
        yield Group(self._head(width), *_packed(self._numbers(), width))

    def _head(self, width: int) -> Table:
        head = Table.grid(padding=(0, 1))
        cells: list[Text | ProgressBar | Spinner] = [self._spinner]
        count = f"{self._done}/{self._total}" if self._total is not None else ""
        cells.append(Text(f"{self._stage} {count}".strip(), style="bold", no_wrap=True, overflow="ellipsis"))
        if self._total and width >= 60:
            cells.append(ProgressBar(total=self._total, completed=self._done, width=max(8, min(30, width - 60))))
        if width >= 40:
            cells.append(Text(self._phase, style="dim", no_wrap=True, overflow="ellipsis"))
        eta = self.eta_seconds()
        elapsed = duration(self._clock() - self._began)
        clock = elapsed if eta is None else f"{elapsed}, {duration(eta)} left"
        cells.append(Text(clock, style="dim", no_wrap=True, overflow="ellipsis"))
        for _ in cells:
            head.add_column(no_wrap=True, overflow="ellipsis")
        head.add_row(*cells)
        return head


def summary_table(result: RunResult, title: str) -> Table:
    """Before and after as a rich table."""
    table = Table(
        title=f"{title}: held-out evaluation", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    table.add_column("")
    for column in ("before", "after"):
        table.add_column(column, justify="right")
    table.add_row("pass@1", _share(result.pass_at_1_before), Text(_share(result.pass_at_1_after), style="bold"))
    before, after = (_interval(i) for i in (result.pass_at_1_before_interval, result.pass_at_1_after_interval))
    table.add_row("95 % interval", before, after)
    table.add_row("valid format", _share(result.format_valid_before), _share(result.format_valid_after))
    table.add_row("steps", "", str(result.steps))
    table.add_row("training time", "", duration(result.train_seconds))
    return table


def duration(seconds: float) -> str:
    """`42s`, `3m05s`, `2h10m`, `1d04h`.

    >>> [duration(s) for s in (41.6, 185, 7830, 100800)]
    ['42s', '3m05s', '2h10m', '1d04h']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def _packed(numbers: list[tuple[str, str]], width: int) -> list[Text]:
    """`label value` pairs on as few lines as fit; a pair is never torn apart unless it alone is too wide."""
    lines: list[Text] = []
    for label, value in numbers:
        pair = Text.assemble((label, "dim"), " ", (value, "bold"))
        if lines and lines[-1].cell_len + 3 + pair.cell_len <= width:
            lines[-1].append("   ").append_text(pair)
        else:
            lines.append(Text("  ", no_wrap=True, overflow="ellipsis").append_text(pair))
    return lines


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _interval(interval: Interval | None) -> str:
    return "-" if interval is None else f"[{interval[0]:.3f}, {interval[1]:.3f}]"
