"""The samples with the largest gaps are found in a step's dump."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.monitor.report_data import ReportError
from megatron_rl.monitor.worst import worst_samples
from megatron_rl.rollout.dump import SCHEMA


def dump(run_dir: Path, step: int, gaps: list[float | None]) -> None:
    folder = run_dir / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"sample_id": f"s{i}", "gap_max_abs": gap, "gap_mean_abs": gap, "turns": 1} for i, gap in enumerate(gaps)]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), folder / f"step-{step:06d}.parquet")


def test_the_largest_gaps_of_the_newest_step_come_first(tmp_path: Path) -> None:
    dump(tmp_path, 9, [9.0])
    dump(tmp_path, 10, [0.1, None, 0.3, 0.2])
    step, rows = worst_samples(tmp_path, None, 2)
    assert (step, [row["sample_id"] for row in rows]) == (10, ["s2", "s3"])
    assert [row["sample_id"] for row in worst_samples(tmp_path, 9, 5)[1]] == ["s0"]
    shown = CliRunner().invoke(app, ["worst", str(tmp_path), "--count", "1"])
    assert shown.exit_code == 0
    assert "step 10" in shown.output
    assert "3.000e-01" in shown.output
    assert "s3" not in shown.output


def test_a_step_without_gaps_or_without_a_dump_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"there is no dump; .*logging\.dump_rollouts"):
        worst_samples(tmp_path, None, 1)
    dump(tmp_path, 1, [None])
    with pytest.raises(ReportError, match=r"no sample has a gap; .*old_logprobs=recompute"):
        worst_samples(tmp_path, 1, 1)
    with pytest.raises(ReportError, match="no dump of step 2; a run writes one"):
        worst_samples(tmp_path, 2, 1)


def test_a_dump_that_was_cut_or_is_none_is_refused_and_other_files_are_passed_over(tmp_path: Path) -> None:
    dump(tmp_path, 1, [0.1])
    file = tmp_path / "rollouts" / "step-000001.parquet"
    (tmp_path / "rollouts" / "step-last.parquet").touch()
    assert worst_samples(tmp_path, None, 1)[0] == 1
    for content in (file.read_bytes()[:100], b""):
        file.write_bytes(content)
        with pytest.raises(ReportError, match=r"step-000001\.parquet: cannot be read \(.*another step with --step"):
            worst_samples(tmp_path, None, 1)
    pq.write_table(pa.table({"gap_max_abs": [1.0]}), file)
    with pytest.raises(ReportError, match=r"step-000001\.parquet: no dump of a run, it lacks sample_id, prompt_id"):
        worst_samples(tmp_path, None, 1)


@pytest.mark.parametrize("words", [["--count", "9" * 30], ["--step", "9" * 300]])
def test_numbers_that_overflow_are_refused_by_the_command_line(tmp_path: Path, words: list[str]) -> None:
    dump(tmp_path, 1, [0.1])
    refused = CliRunner().invoke(app, ["worst", str(tmp_path), *words])
    assert (refused.exit_code, refused.exception.__class__) == (2, SystemExit)
