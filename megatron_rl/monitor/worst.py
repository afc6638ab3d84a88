"""The samples of a step on which trainer and engine are furthest apart, from its dump; nothing is computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from .report_data import ReportError

COLUMNS = (
    "sample_id",
    "prompt_id",
    "gap_max_abs",
    "gap_mean_abs",
    "routing_mismatch",
    "response_tokens",
    "turns",
    "weight_version_first",
    "weight_version_last",
    "finish_reason",
)


def worst_samples(run_dir: Path, step: int | None, count: int) -> tuple[int, list[dict[str, Any]]]:
    """The step (the newest dumped one without `step`) and up to `count` of its samples, largest gap first.

    Raises:
        ReportError: there is no dump of that step, or none of its samples has a gap.
    """
    dumps = sorted((run_dir / "rollouts").glob("step-*.parquet"))
    path = (run_dir / "rollouts" / f"step-{step:06d}.parquet") if step is not None else (dumps[-1] if dumps else None)
    if path is None or not path.is_file():
        raise ReportError(
            f"{path or run_dir / 'rollouts'}: there is no dump; a run writes one for each step with "
            "logging.dump_rollouts=true"
        )
    table = pq.read_table(path)
    if "gap_max_abs" not in table.column_names or table["gap_max_abs"].null_count == len(table):
        raise ReportError(
            f"{path}: no sample has a gap; it is known where the trainer computes log-probs of its own "
            "(algorithm.old_logprobs=recompute)"
        )
    known = table.filter(pc.is_valid(table["gap_max_abs"])).select(list(COLUMNS))
    rows: list[dict[str, Any]] = known.sort_by([("gap_max_abs", "descending")]).slice(0, count).to_pylist()
    return int(path.stem.removeprefix("step-")), rows
