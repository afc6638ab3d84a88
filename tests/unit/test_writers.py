"""metrics.jsonl survives crashes and restores; TensorBoard and W&B follow; a failing view stops no run."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from megatron_rl.monitor.metrics import MetricValue
from megatron_rl.monitor.metrics_log import MetricsFileError, MetricsLog, read_metrics
from megatron_rl.monitor.writers import TensorBoardWriter, WandbWriter, Writers


def write_rows(path: Path, steps: range) -> None:
    log = MetricsLog(path)
    for step in steps:
        log.write(step, {"reward/mean": step / 10, "policy/loss": None})
    log.close()


def test_each_row_is_one_json_object_that_is_readable_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "new" / "metrics.jsonl")
    log.write(3, {"reward/mean": 0.25, "policy/loss": math.nan})
    row = json.loads((tmp_path / "new" / "metrics.jsonl").read_text("utf-8"))
    assert {key: row[key] for key in ("step", "reward/mean", "policy/loss")} == {
        "step": 3,
        "reward/mean": 0.25,
        "policy/loss": None,
    }
    assert row["time"] > 1.7e9
    log.close()
    log.close()  # a second time is harmless


def test_wherever_a_crash_tears_the_file_reading_and_reopening_lose_at_most_one_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(3))
    whole, rows = path.read_bytes(), read_metrics(path)
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        kept = read_metrics(path)
        assert kept == rows[: len(kept)]
        assert len(kept) >= whole[:cut].count(b"\n")
        log = MetricsLog(path)
        log.write(7, {})
        log.close()
        assert [row["step"] for row in read_metrics(path)] == [*(row["step"] for row in kept), 7]
        assert path.read_bytes().count(b"\n") == len(kept) + 1


def test_a_block_of_zero_bytes_left_by_a_power_failure_is_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(2))
    with path.open("ab") as file:
        file.write(b"\x00" * 64)
    write_rows(path, range(2, 3))
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]


@pytest.mark.parametrize("line", ["{broken", '["a list"]', '{"no": "step"}', '{"step": "one"}'])
def test_a_damaged_line_in_the_middle_is_named_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n', "utf-8")
    with pytest.raises(MetricsFileError, match=r"metrics.jsonl:2: not a metrics row; remove this line"):
        read_metrics(path)


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_rows_beyond_the_restored_step_are_dropped_and_writing_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(6))
    log = MetricsLog(path)
    log.truncate_after(3)
    log.truncate_after(3)  # nothing left to drop
    log.write(4, {"reward/mean": 9.0})
    log.close()
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[-1]["reward/mean"] == 9.0
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return [(event.step, round(event.value, 6)) for event in accumulator.Scalars(tag)]


def test_tensorboard_shows_finite_values_and_hides_what_a_restore_undid(tmp_path: Path) -> None:
    first = TensorBoardWriter(tmp_path)
    for step in range(1, 5):
        first.write(step, {"reward/mean": step / 10, "policy/loss": None})
    first.close()
    second = TensorBoardWriter(tmp_path)
    second.truncate_after(2)
    second.write(3, {"reward/mean": 0.9})
    second.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 0.1), (2, 0.2), (3, 0.9)]
    with pytest.raises(KeyError):
        scalars(tmp_path, "policy/loss")


def test_tensorboard_shows_the_warm_up_over_its_own_steps(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    for step in (1, 2):
        writer.write(0, {"sft/step": float(step), "sft/loss": 1.0 / step})
    writer.close()
    assert scalars(tmp_path / "warm-up", "sft/loss") == [(1, 1.0), (2, 0.5)]
    resumed = TensorBoardWriter(tmp_path)
    resumed.truncate_after(0)
    resumed.write(1, {"reward/mean": 0.5})
    resumed.close()
    assert scalars(tmp_path / "warm-up", "sft/loss") == [(1, 1.0), (2, 0.5)]
    again = TensorBoardWriter(tmp_path)
    again.truncate_after(-1)
    again.write(0, {"sft/step": 1.0, "sft/loss": 3.0})
    again.close()
    assert scalars(tmp_path / "warm-up", "sft/loss") == [(1, 3.0)]


def test_wandb_that_is_not_installed_is_a_plain_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what Python does for a module that cannot be found
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'megatron-rl\[wandb\]'.*or set logging.wandb=false"):
        Writers.open(tmp_path, wandb_project="p")


def test_wandb_works_offline_and_goes_on_under_the_same_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "exit", sys.exit)  # which wandb replaces for good
    pytest.importorskip("wandb")
    for step in (1, 2):
        writer = WandbWriter(tmp_path, project="p", name="n", config={"seed": 1})
        writer.write(step, {"reward/mean": 0.5, "policy/loss": None})
        writer.close()
    run_id = (tmp_path / "wandb" / "run_id").read_text("utf-8")
    assert len(list(tmp_path.glob(f"wandb/offline-run-*-{run_id}*/run-{run_id}.wandb"))) == 2


class Broken:
    """A view whose disk is full."""

    calls = 0

    def write(self, step: int, metrics: Mapping[str, MetricValue]) -> None:
        self.calls += 1
        raise OSError(28, "No space left on device")

    def truncate_after(self, step: int) -> None:
        raise AssertionError("left out before")

    def close(self) -> None:
        raise AssertionError("left out before")


def test_a_view_that_fails_is_reported_once_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = Broken()
    with caplog.at_level(logging.ERROR), closing(Writers(MetricsLog(tmp_path / "metrics.jsonl"), [broken])) as writers:
        writers.write(1, {"reward/mean": 0.1})
        writers.write(2, {"reward/mean": 0.2})
        writers.truncate_after(1)
    assert broken.calls == 1
    assert [record.message for record in caplog.records] == [
        "Broken failed and is left out from here on; metrics.jsonl goes on"
    ]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_a_record_that_cannot_be_written_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        Writers(Broken()).write(1, {})


def test_opening_for_a_resumed_run_cuts_every_writer_at_its_step(tmp_path: Path) -> None:
    with closing(Writers.open(tmp_path)) as writers:
        for step in range(1, 6):
            writers.write(step, {"reward/mean": step / 10})
    with closing(Writers.open(tmp_path, resume_step=3)) as writers:
        writers.write(4, {"reward/mean": 0.99})
    expected = [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.99)]
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(tmp_path / "metrics.jsonl")] == expected
    assert scalars(tmp_path / "tensorboard", "reward/mean") == expected
