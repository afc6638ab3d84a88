"""The samples of a step on which trainer and engine are furthest apart, from its dump; nothing is computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megatron_rl.files import regular

from .report_data import ReportError, dumps

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
        ReportError: there is no dump of that step, it is damaged, or none of its samples has a gap.
    """
    found = dumps(run_dir / "rollouts")
    number = step if step is not None else max(found, default=0)
    if number not in found:
        which = "" if step is None else f" of step {step}"
        raise ReportError(
            f"{run_dir / 'rollouts'}: there is no dump{which}; a run writes one for each step with "
            "logging.dump_rollouts=true"
        )
    path = found[number]
    try:
        table = pq.read_table(regular(path))
    except (OSError, pa.ArrowException) as error:
        raise ReportError(f"{path}: cannot be read ({error}); give another step with --step") from error
    if missing := [name for name in COLUMNS if name not in table.column_names and name != "gap_max_abs"]:
        raise ReportError(f"{path}: no dump of a run, it lacks {', '.join(missing)}; give another step with --step")
    if "gap_max_abs" not in table.column_names or table["gap_max_abs"].null_count == len(table):
        raise ReportError(
            f"{path}: no sample has a gap; it is known where the trainer computes log-probs of its own "
            "(algorithm.old_logprobs=recompute)"
        )
    known = table.filter(pc.is_valid(table["gap_max_abs"])).select(list(COLUMNS))
    rows: list[dict[str, Any]] = known.sort_by([("gap_max_abs", "descending")]).slice(0, count).to_pylist()
    return number, rows
