"""The report page: complete, self-contained, escaped, bounded, and graceful about what is missing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.monitor import report_charts
from megatron_rl.monitor.metrics_log import MetricsLog
from megatron_rl.monitor.report import ReportError, build_report, script_json
from megatron_rl.monitor.report_charts import build_charts, moving_average, thinned
from megatron_rl.monitor.report_data import RunData, Series, read_run
from megatron_rl.monitor.report_facts import run_facts
from megatron_rl.monitor.report_samples import MAX_RESPONSE, spread
from tests.synthetic_run import HOSTILE, write_run


class Page(HTMLParser):
    """The parts of a report that tests look at."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.raw = path.read_text("utf-8")
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.policy = ""
        self._open = ""
        self.feed(self.raw)
        self.data = next(json.loads(text) for attrs, text in self.scripts if attrs.get("type") == "application/json")
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = tag
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"] or ""

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            attrs, text = self.scripts[-1]
            self.scripts[-1] = (attrs, text + data)
        elif self._open != "style":
            self.words.append(data)

    def chart(self, title: str) -> dict[str, Any]:
        return next(chart for chart in self.data["charts"] if chart["title"] == title)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), steps=44)


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Page:
    return Page(build_report(run_dir))


def test_the_page_has_every_chart_and_the_headline(page: Page) -> None:
    titles = [chart["title"] for chart in page.data["charts"]]
    assert titles == [
        "Reward",
        "Held-out pass@1",
        "Held-out pass@k",
        "Reward components",
        "Supervised warm-up",
        "Response length and truncation",
        "Entropy",
        "Groups without a signal",
        "Clip fraction",
        "Gradient norm and learning rate",
        "KL divergence",
        "Gap between trainer and engine",
        "Where the time goes",
        "Throughput",
    ]
    assert all(chart["healthy"] in page.text for chart in page.data["charts"])
    assert "0.070 → 0.888" in page.text
    assert "12.7 times as many right answers; the 95 % intervals do not overlap" in page.text
    assert "finished, step 44 of 44" in page.text
    assert "TP 2 × DP 1" in page.text


def test_the_page_refers_to_nothing_outside_itself(page: Page) -> None:
    links = [item for item in page.attributes if item[1] in ("src", "href", "srcset", "action", "data", "poster")]
    assert links == []
    assert "@import" not in page.raw
    assert "url(" not in re.sub(r"<script>.*?</script>", "", page.raw, flags=re.DOTALL)


def test_only_the_two_built_in_scripts_may_run(page: Page) -> None:
    running = [text for attrs, text in page.scripts if "type" not in attrs]
    assert len(running) == 2
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in running]
    assert f"script-src 'sha256-{hashes[0]}' 'sha256-{hashes[1]}';" in page.policy
    assert page.policy.startswith("default-src 'none';")


def test_hostile_text_stays_text(page: Page) -> None:
    last = page.data["samples"]["train"][-1]["samples"]
    assert HOSTILE in [sample["response"] for sample in last]
    assert HOSTILE in [sample["prompt"] for sample in last]
    assert [name for _, name, _ in page.attributes if name.startswith("on")] == []
    assert "window.hacked = true</script>" not in page.raw


def test_hostile_names_and_settings_stay_text(tmp_path: Path) -> None:
    nasty = "<img src=x onerror=alert(1)>"
    (tmp_path / "config.yaml").write_text(f"name: '{nasty}'\nmodel: {{path: '{nasty}'}}\n", "utf-8")
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(1, {f"reward/{nasty}": 1.0, "reward/b": 1.0, "reward/mean": 1.0})
    log.close()
    page = Page(build_report(tmp_path))
    assert nasty in page.text
    assert [value for tag, _, value in page.attributes if tag == "img"] == []


def test_the_head_of_a_run_with_experts_says_how_they_are_shared_and_replayed(tmp_path: Path) -> None:
    sizes = "tensor_model_parallel_size: 2, context_parallel_size: 2, data_parallel_size: 1"
    text = f"parallel: {{{sizes}, expert_model_parallel_size: 4}}\nmoe: {{routing_replay: R3}}\n"
    (tmp_path / "config.yaml").write_text(text)
    assert dict(run_facts(read_run(tmp_path))["chips"]) == {
        "layout": "TP 2 × CP 2 × DP 1, experts EP 4",
        "routing replay": "R3",
    }
    (tmp_path / "config.yaml").write_text(text.replace("R3", "'off'"))
    assert dict(run_facts(read_run(tmp_path))["chips"])["routing replay"] == "off"


def test_json_for_a_script_element_cannot_end_it_and_means_the_same() -> None:
    value = {"a": "</script><!--<script>&\u2028\u2029", "b": [1.5, None, "\x00é"]}
    text = script_json(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == value


def test_samples_are_spread_over_the_run_and_bounded(run_dir: Path, page: Page) -> None:
    train = page.data["samples"]["train"]
    steps = [step["step"] for step in train]
    assert (steps[0], steps[-1], len(steps)) == (1, 44, 12)
    assert all(len(step["samples"]) == 16 and step["total"] == 32 for step in train)
    assert max(len(s["response"]) for step in train for s in step["samples"]) < MAX_RESPONSE + 100
    long = next(s["response"] for s in train[-1]["samples"] if s["response"].startswith("long"))
    assert "[... 92,000 characters left out ...]" in long
    for step in train:  # several answers to each of several prompts, worst and best of a group among them
        groups = [sample["group_id"] for sample in step["samples"]]
        assert sorted(set(groups)) == [f"{step['step']:06d}-{group:04d}" for group in range(4)]
        assert groups == sorted(groups)
    assert {-0.5, 1.6} < {sample["reward"] for sample in train[-1]["samples"]}
    small = Page(build_report(run_dir, max_steps=2, samples_per_step=3))
    assert [(s["step"], len(s["samples"])) for s in small.data["samples"]["train"]] == [(1, 3), (44, 3)]
    assert [s["step"] for s in small.data["samples"]["eval"]] == [0, 44]
    build_report(run_dir)


def test_a_sample_carries_what_explains_its_reward(page: Page) -> None:
    sample = page.data["samples"]["train"][0]["samples"][0]
    assert set(sample["components"]) == {"sorting", "format"}
    assert sample["group_size"] == 8
    assert 0 <= sample["group_correct"] <= 8
    assert {"reward", "correctness", "response_tokens", "finish_reason", "trained", "weight_version_first"} <= set(
        sample
    )


@pytest.mark.parametrize(("length", "count"), [(0, 3), (1, 3), (3, 3), (10, 4), (1000, 12), (5, 1), (5, 0)])
def test_a_spread_keeps_order_first_and_last_and_never_repeats(length: int, count: int) -> None:
    chosen = spread(range(length), count)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(length, count)
    if length and count > 1:
        assert (chosen[0], chosen[-1]) == (0, length - 1)


def test_the_same_run_gives_the_same_page_and_leaves_no_temporary_file(run_dir: Path) -> None:
    first = build_report(run_dir).read_bytes()
    assert build_report(run_dir).read_bytes() == first
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "config.yaml",
        "eval",
        "metrics.jsonl",
        "report.html",
        "result.json",
        "rollouts",
    ]


@pytest.mark.parametrize("kind", ["missing", "file", "other"])
def test_a_wrong_directory_is_a_plain_error(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    if kind == "file":
        target.write_text("x", "utf-8")
    if kind == "other":
        target.mkdir()
        (target / "notes.txt").write_text("x", "utf-8")
    expected = "not the directory of a run: it holds neither metrics.jsonl" if kind == "other" else "is not a directory"
    with pytest.raises(ReportError, match=expected):
        build_report(target)


def test_a_run_without_evaluations_or_rollouts_says_what_it_lacks(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(1, {"reward/mean": 0.5, "policy/entropy": None})
    log.close()
    page = Page(build_report(tmp_path))
    assert [chart["title"] for chart in page.data["charts"]] == ["Reward"]
    assert "No evaluation has been recorded yet." in page.text
    assert "No rollouts were dumped yet" in page.text
    assert "Not recorded in this run: Held-out pass@1, " in page.text
    assert "config.yaml is missing" in page.text


def test_a_run_in_progress_compares_the_first_evaluation_with_the_latest(tmp_path: Path) -> None:
    page = Page(build_report(write_run(tmp_path, steps=20, scenario="running", sft_steps=0)))
    assert "in progress or stopped, step 20 of 40" in page.text
    assert re.search(r"first 0\.039 to 0\.101 latest 0\.\d+ to", page.text)


def test_parts_that_cannot_be_read_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path, steps=10, dump_every=5)
    (tmp_path / "rollouts" / "step-000005.parquet").write_bytes(b"PAR1 and then nothing")
    (tmp_path / "result.json").write_text("{", "utf-8")
    (tmp_path / "config.yaml").write_text("a: [", "utf-8")
    page = Page(build_report(tmp_path))
    assert [step["step"] for step in page.data["samples"]["train"]] == [10]
    assert "step-000005.parquet in rollouts/ could not be read" in page.text
    assert "result.json is not the result of a run" in page.text
    assert "config.yaml is not valid YAML" in page.text
    assert len(page.data["charts"]) == 14


def test_a_damaged_metrics_file_costs_the_charts_and_not_the_page(tmp_path: Path) -> None:
    write_run(tmp_path, steps=4)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'{"step":0', b'{"stp":0', 1))
    page = Page(build_report(tmp_path))
    assert "metrics.jsonl:1: not a metrics row" in page.text
    assert page.data["charts"] == []
    assert page.data["samples"]["train"]


def test_health_lines_are_shown_with_their_step_and_only_when_there_are_any(tmp_path: Path, page: Page) -> None:
    collapsed = Page(build_report(write_run(tmp_path, steps=80, scenario="collapse", dump_every=40)))
    assert re.search(r"Worth a look step \d+ entropy collapse: ", collapsed.text)
    assert "Worth a look" not in page.text


def test_a_later_row_of_the_same_step_wins(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step, value in ((1, 0.1), (2, 0.2), (2, 0.9), (3, 0.3)):
        log.write(step, {"reward/mean": value})
    log.close()
    assert read_run(tmp_path).get("reward/mean") == Series([1, 2, 3], [0.1, 0.9, 0.3])


def test_phase_bars_add_up_to_the_step_even_when_bars_hold_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list(range(1, 101))
    evaluated = [step for step in steps if step % 10 == 0]
    data = RunData(Path("run"))
    data.series = {
        "time/step": Series(steps, [3.0 if step in evaluated else 2.0 for step in steps]),
        "time/train": Series(steps, [1.5] * 100),
        "time/eval": Series(evaluated, [1.0] * 10),
    }
    for bars in (100, 7):
        monkeypatch.setattr(report_charts, "MAX_BARS", bars)
        chart = next(chart for chart in build_charts(data)[0] if chart["title"] == "Where the time goes")
        assert [trace["name"] for trace in chart["traces"]] == ["train", "eval", "other"]
        assert all(len(trace["x"]) <= bars for trace in chart["traces"])
    size = -(-100 // 7)
    widths = [min(size, 100 - start) for start in range(0, 100, size)]
    whole = [sum(trace["y"][i] for trace in chart["traces"]) * width for i, width in enumerate(widths)]
    assert sum(whole) == pytest.approx(210.0, abs=0.01)


def test_long_series_are_thinned_and_keep_their_last_point() -> None:
    series = Series(list(range(5001)), [float(i) for i in range(5001)])
    thin = thinned(series)
    assert len(thin.x) <= 1200
    assert (thin.x[-1], thin.y[-1]) == (5000, 5000.0)
    assert thinned(Series([1], [None])) == Series([1], [None])


def test_a_line_whose_feature_is_off_is_left_out_and_a_lonely_line_keeps_its_name(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    clip = {"policy/clip_fraction_high": 0.01, "policy/clip_fraction_low": 0.0, "policy/clip_fraction_dual": 0.0}
    log.write(1, {**clip, "policy/kl_old": 0.001, "policy/entropy": 0.5})
    log.close()
    page = Page(build_report(tmp_path))
    assert [trace["name"] for trace in page.chart("Clip fraction")["traces"]] == ["clipped high", "clipped low"]
    assert page.chart("KL divergence")["legend"]
    assert not page.chart("Entropy")["legend"]


def test_the_moving_average_follows_a_line_without_lag_and_skips_gaps() -> None:
    values: list[float | None] = [float(i) for i in range(200)]
    values[50] = None
    smooth = moving_average(Series(list(range(200)), values))
    assert smooth[100] == pytest.approx(100.0)
    assert smooth[50] == pytest.approx(50.0)
    assert moving_average(Series([1], [None])) == [None]


def test_a_gap_of_exactly_zero_is_drawn_on_a_linear_axis(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(1, {"gap/mean_abs": 0.0, "gap/max_abs": 0.0})
    log.close()
    axis = Page(build_report(tmp_path)).chart("Gap between trainer and engine")["layout"]["yaxis"]
    assert "type" not in axis


@pytest.mark.parametrize(("steps", "every"), [(2, 1), (7, 1), (40, None)])
def test_a_short_run_gets_one_tick_at_each_whole_step(tmp_path: Path, steps: int, every: int | None) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, steps + 1):
        log.write(step, {"policy/entropy": 1.0 / step})
    log.close()
    charts, _ = build_charts(read_run(tmp_path))
    entropy = next(chart for chart in charts if chart["title"] == "Entropy")
    assert entropy["layout"]["xaxis"].get("dtick") == every
