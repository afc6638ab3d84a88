"""Parquet files for people: every sample of a step or an evaluation, with text. No run reads them back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.data import PromptRecord, PromptTokenizer
from megatron_rl.files import atomic_file

from .sample import Group
from .wire import Gaps

WARM_UP = "sft"
"""Label of evaluations during the supervised warm-up."""
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("sample_id", pa.string()),
        ("group_id", pa.int64()),
        ("prompt_id", pa.string()),
        ("source", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("answer", pa.string()),
        ("reward", pa.float64()),
        ("correctness", pa.float64()),
        ("components", pa.string()),
        ("response_tokens", pa.int64()),
        ("turns", pa.int64()),
        ("finish_reason", pa.string()),
        ("trained", pa.bool_()),
        ("weight_version_first", pa.int64()),
        ("weight_version_last", pa.int64()),
        ("log_prob_mean", pa.float64()),
        ("gap_mean_abs", pa.float64()),
        ("gap_max_abs", pa.float64()),
        ("routing_mismatch", pa.float64()),
    ]
)


def rollout_file(run_dir: str | Path, step: int) -> Path:
    """RUN/rollouts/step-000012.parquet."""
    return Path(run_dir) / "rollouts" / f"step-{step:06d}.parquet"


def evaluation_file(run_dir: str | Path, step: int, label: str) -> Path:
    """RUN/eval/step-000010.parquet; evaluations with another label than `eval` get step-000010-<label>.parquet."""
    suffix = "" if label == "eval" else f"-{label}"
    return Path(run_dir) / "eval" / f"step-{step:06d}{suffix}.parquet"


def write_dump(
    path: Path,
    step: int,
    groups: Sequence[Group],
    records: Sequence[PromptRecord],
    tokenizer: PromptTokenizer,
    batch: Collection[int],
    gaps: Gaps | None = None,
) -> None:
    """Write all samples of `groups` (one record each) atomically.

    `batch`: ids of the groups that were trained on; `gaps`: of their samples, in the order of `groups`.
    """
    rows = [
        row
        for group, record in zip(groups, records, strict=True)
        for row in _rows(
            step, group, record, tokenizer.decode(group.samples[0].prompt_tokens.tolist()), group.id in batch
        )
    ]
    if gaps is not None:
        trained = [row for row in rows if row["group_id"] in batch]
        for name, values in gaps.items():
            for row, value in zip(trained, values, strict=True):
                row[name] = value
    with atomic_file(path) as file:
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), file, compression="zstd")


def _rows(step: int, group: Group, record: PromptRecord, prompt: str, in_batch: bool) -> list[dict[str, object]]:
    return [
        {
            "step": step,
            "sample_id": sample.id,
            "group_id": group.id,
            "prompt_id": group.prompt_id,
            "source": record.source,
            "prompt": prompt,
            "response": sample.text,
            "answer": record.answer,
            "reward": sample.reward,
            "correctness": sample.correctness,
            "components": orjson.dumps(sample.components).decode(),
            "response_tokens": sample.response_length,
            "turns": len(sample.turns),
            "finish_reason": sample.finish_reason,
            "trained": in_batch and sample.trainable_tokens > 0,
            "weight_version_first": sample.version_first,
            "weight_version_last": sample.version_last,
            "log_prob_mean": float(sample.log_probs[sample.sampled].mean()) if sample.turns else None,
        }
        for sample in group.samples
    ]


def remove_dumps_from(run_dir: str | Path, step: int) -> None:
    """Delete the dumps of `step` and later ones: a resumed run makes them again. Step 0 and before: all dumps.

    Evaluations of the warm-up count its own steps; they go only with everything else.
    """
    for path in [*Path(run_dir).glob("rollouts/step-*.parquet"), *Path(run_dir).glob("eval/step-*.parquet")]:
        number, _, label = path.stem.removeprefix("step-").partition("-")
        if step <= 0 or (int(number) >= step and label != WARM_UP):
            path.unlink()
