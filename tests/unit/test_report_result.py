"""The result of a run: a file that reads back, a last line that scripts can parse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.monitor.result import RunResult

BEFORE = {
    "eval/pass_at_1": 0.07000000000000001,
    "eval/pass_at_1_low": 0.0499999,
    "eval/pass_at_1_high": 0.1,
    "eval/format_valid": 0.92,
}
AFTER = {"eval/pass_at_1": 0.72, "eval/pass_at_1_low": 0.66, "eval/pass_at_1_high": 0.78, "eval/format_valid": None}


def result(run_dir: Path, before: dict | None = BEFORE) -> RunResult:
    return RunResult.from_evaluations(before, AFTER, train_seconds=160.23, steps=60, seed=3, run_dir=run_dir)


def test_the_last_line_is_one_line_of_json_with_the_promised_keys(tmp_path: Path) -> None:
    line = result(tmp_path).line()
    assert line.startswith("RESULT {")
    assert "\n" not in line
    assert json.loads(line.removeprefix("RESULT ")) == {
        "pass_at_1_before": 0.07,
        "pass_at_1_after": 0.72,
        "pass_at_1_before_interval": [0.05, 0.1],
        "pass_at_1_after_interval": [0.66, 0.78],
        "format_valid_before": 0.92,
        "format_valid_after": None,
        "train_seconds": 160.2,
        "steps": 60,
        "seed": 3,
        "run_dir": str(tmp_path),
    }


@pytest.mark.parametrize("before", [BEFORE, None])
def test_what_was_written_reads_back_the_same(tmp_path: Path, before: dict | None) -> None:
    written = result(tmp_path, before)
    assert written.write() == tmp_path / "result.json"
    assert RunResult.read(tmp_path) == written
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_run_without_a_result_reads_as_none_and_a_broken_one_is_named(tmp_path: Path) -> None:
    assert RunResult.read(tmp_path) is None
    for content in ("{", "[]", '{"pass_at_1_before": 1}'):
        (tmp_path / "result.json").write_text(content, "utf-8")
        with pytest.raises(ValueError, match=r"result.json is not the result of a run .*; remove it"):
            RunResult.read(tmp_path)
