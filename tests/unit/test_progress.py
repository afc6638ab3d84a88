"""The terminal display: in place on a terminal, one line a step elsewhere, whole at any width."""

from __future__ import annotations

import io
import re
from contextlib import closing

import pytest
from rich.cells import cell_len
from rich.console import Console

from megatron_rl.monitor.progress import Progress, duration
from megatron_rl.monitor.result import RunResult

METRICS = {
    "reward/mean": 0.5,
    "rollout/response_length_mean": 14.24,
    "policy/entropy": 0.4123,
    "system/tokens_per_second": 1830.2,
    "policy/loss": None,
}
EVALUATION = {"eval/pass_at_1": 0.07, "eval/pass_at_1_low": 0.05, "eval/pass_at_1_high": 0.1}
RESULT = RunResult(0.07, 0.72, (0.05, 0.1), (0.66, 0.78), 0.92, None, 160.2, 60, 1, "runs/x")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def console(*, terminal: bool, width: int = 100, **environment: str) -> Console:
    return Console(
        file=io.StringIO(),
        width=width,
        height=24,
        force_terminal=terminal,
        highlight=False,
        color_system="truecolor" if terminal else None,
        _environ={"TERM": "xterm-256color", **environment},
    )


def text(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def test_without_a_terminal_every_step_is_one_plain_line() -> None:
    out, clock = console(terminal=False), Clock()
    with closing(Progress("quickstart", console=out, clock=clock)) as progress:
        progress.values(0, EVALUATION)
        progress.stage("DAPO", total=4)
        for step in (1, 2):
            progress.phase("generate")
            clock.now += 3
            progress.step(step, METRICS)
    numbers = "reward 0.500  pass@1 0.070 [0.050, 0.100] @0  length 14.2  entropy 0.412  tok/s 1,830  3.0 s"
    assert text(out).splitlines() == [
        "DAPO: 4 steps",
        f"DAPO 1/4  {numbers}  ETA 9s",
        f"DAPO 2/4  {numbers}  ETA 6s",
    ]


def test_a_narrow_pipe_still_gets_whole_lines() -> None:
    out = console(terminal=False, width=20)
    with closing(Progress("quickstart", console=out)) as progress:
        progress.stage("DAPO", total=4)
        progress.step(1, METRICS)
        progress.note("WARNING entropy collapse: a long explanation of what to do about it")
    assert [line.split(" ", 1)[0] for line in text(out).splitlines()] == ["DAPO:", "DAPO", "WARNING"]


def test_the_warm_up_shows_its_own_numbers_and_they_go_with_it() -> None:
    out = console(terminal=False, width=200)
    with closing(Progress("quickstart", console=out)) as progress:
        progress.stage("SFT warm-up")
        progress.step(3, {"sft/loss": 1.25, "sft/format_valid": 0.9})
        progress.stage("DAPO", total=2)
        progress.step(1, METRICS)
    warm_up, dapo = (line for line in text(out).splitlines() if "  " in line)
    assert warm_up.startswith("SFT warm-up 3  loss 1.2500  format valid 0.90  ")
    assert "ETA" not in warm_up
    assert "loss" not in dapo


@pytest.mark.parametrize("width", [8, 20, 39, 40, 59, 60, 100, 200])
def test_the_live_lines_fit_every_width(width: int) -> None:
    out = console(terminal=False, width=width)
    progress = Progress("quickstart", console=out, mode="quiet")
    progress.stage("DAPO", total=60)
    progress.phase("weights")
    progress.values(0, EVALUATION)
    progress.step(7, METRICS)
    out.print(progress)
    lines = text(out).splitlines()
    assert lines
    assert max(cell_len(line) for line in lines) <= width
    if width >= 60:
        assert "7/60" in lines[0]
        assert "updating the engines" in lines[0]
    if width >= 40:
        assert "pass@1 0.070 [0.050, 0.100] @0" in text(out)


def test_a_terminal_gets_live_lines_with_notes_and_prints_above_them(capsys: pytest.CaptureFixture[str]) -> None:
    out = console(terminal=True)
    with closing(Progress("quickstart", console=out)) as progress:
        progress.stage("DAPO", total=60)
        progress.step(1, METRICS)
        progress.note("WARNING gap: look")
        print("somebody prints")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text(out))
    assert "WARNING gap: look" in shown
    assert "somebody prints" in shown
    assert "DAPO 1/60" in shown
    assert "\x1b[?25h" in text(out)  # the cursor is shown again at the end
    assert capsys.readouterr().out == ""


def test_no_color_is_obeyed() -> None:
    for environment, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        out = console(terminal=True, **environment)
        with closing(Progress("quickstart", console=out)) as progress:
            progress.stage("DAPO", total=60)
            progress.note("WARNING gap: look")
        assert bool(re.search(r"\x1b\[(?:\d+;)*(?:3[0-7]|38|9[0-7])", text(out))) == coloured


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines() -> None:
    out = console(terminal=True, TERM="dumb")
    with closing(Progress("quickstart", console=out)) as progress:
        progress.stage("DAPO", total=2)
        progress.step(1, METRICS)
    assert "\x1b[?25" not in text(out)
    assert "DAPO 1/2  reward" in text(out)


def test_quiet_prints_nothing() -> None:
    out = console(terminal=True)
    with closing(Progress("quickstart", mode="quiet", console=out)) as progress:
        progress.stage("DAPO", total=2)
        progress.step(1, METRICS)
        progress.note("WARNING gap")
        progress.summary(RESULT)
    assert text(out) == ""


def test_remaining_time_follows_the_last_twenty_steps_and_counts_from_where_a_run_resumed() -> None:
    clock = Clock()
    progress = Progress("quickstart", mode="quiet", console=console(terminal=False), clock=clock)
    assert progress.eta_seconds() is None
    progress.stage("DAPO", total=100, done=40)
    clock.now += 50
    progress.step(41, {})
    assert progress.eta_seconds() == 59 * 50
    for step in range(42, 62):
        clock.now += 2
        progress.step(step, {})
    assert progress.eta_seconds() == 39 * 2


def test_the_closing_table_shows_before_and_after_even_when_something_was_not_measured() -> None:
    out = console(terminal=False, width=60)
    Progress("quickstart", console=out).summary(RESULT)
    rows = [re.split(r"\s{2,}", line.strip()) for line in text(out).splitlines()]
    assert ["pass@1", "0.070", "0.720"] in rows
    assert ["95 % interval", "[0.050, 0.100]", "[0.660, 0.780]"] in rows
    assert ["valid format", "0.920", "-"] in rows
    assert ["training time", "2m40s"] in rows


def test_durations_read_well() -> None:
    assert [duration(s) for s in (0.4, 41.6, 59.6, 185, 7830, 100800)] == [
        "0s",
        "42s",
        "1m00s",
        "3m05s",
        "2h10m",
        "1d04h",
    ]
