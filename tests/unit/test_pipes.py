"""A pipe in the place of a file that is read is refused: nobody writes into it, so that opening it would not end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.config import ConfigError, load_config
from megatron_rl.config.engine import read_key
from megatron_rl.engines.embedded.weights import Weights, load_model
from megatron_rl.engines.embedded.weights import WeightsError as ServedWeightsError
from megatron_rl.files import regular
from megatron_rl.monitor.metrics_log import MetricsFileError, MetricsLog
from megatron_rl.monitor.report import build_report
from megatron_rl.monitor.result import RunResult
from megatron_rl.policy import checkpoint
from megatron_rl.policy.checkpoint import CheckpointError
from megatron_rl.rollout.ledger import Ledger, LedgerError
from megatron_rl.verify import read_texts
from megatron_rl.weights import WeightsError
from megatron_rl.weights.convert import actions
from megatron_rl.weights.convert.cuts import TargetLayout
from megatron_rl.weights.convert.opened import open_checkpoint
from tests.convert_models import convert, write_model
from tests.synthetic_run import write_run
from tests.tiny import tiny_model


def pipe(path: Path) -> Path:
    """`path`, with a pipe there instead of what there was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    ("name", "read", "error"),
    [
        ("my.yaml", load_config, ConfigError),
        ("engine.key", lambda path: read_key(path, "engine.api_key_file"), ConfigError),
        ("texts", read_texts, WeightsError),
        ("checkpoints/step-000002/manifest.json", lambda path: checkpoint.verify(path.parent), CheckpointError),
        ("ledger.jsonl", lambda path: Ledger(path.parent).read(), LedgerError),
        ("ledger.jsonl", lambda path: Ledger(path.parent).truncate_after(3), LedgerError),
        ("metrics.jsonl", MetricsLog, MetricsFileError),
        ("result.json", lambda path: RunResult.read(path.parent), ValueError),
        ("anything", regular, OSError),
    ],
)
def test_a_pipe_instead_of_a_file_is_refused_by_its_name(
    tmp_path: Path, name: str, read: Callable[[Path], object], error: type[Exception]
) -> None:
    path = pipe(tmp_path / name)
    with pytest.raises(error, match="not a regular file") as caught:
        read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".metadata", r"\.metadata: cannot be read .*not a regular file"),
        ("common.pt", r"common\.pt: cannot be read .*not a regular file"),
        ("metadata.json", r"model\.safetensors: file is missing"),  # it is not known for a checkpoint of Megatron's
    ],
)
def test_no_part_of_a_megatron_checkpoint_may_be_a_pipe(tmp_path: Path, name: str, message: str) -> None:
    write_model(tmp_path / "hf")
    layout, converted = TargetLayout(1, 1, 1), tmp_path / "megatron"
    convert(actions.hf_to_megatron(open_checkpoint(tmp_path / "hf"), converted, layout, None))
    pipe(converted / "release" / name)
    with pytest.raises(WeightsError, match=message):
        actions.reshard(open_checkpoint(converted), tmp_path / "out", layout)


def test_an_engine_refuses_weights_that_are_a_pipe_and_keeps_its_own(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", vocab_size=50)
    weights = Weights(load_model(str(folder), "float32"))
    before = weights.checksums()
    pipe(folder / "model.safetensors")
    with pytest.raises(ServedWeightsError, match="not a regular file"):
        weights.update(str(folder))
    assert weights.checksums() == before


def test_a_report_leaves_out_what_is_no_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2, sft_steps=1)
    pipe(run / "config.yaml")
    pipe(next((run / "rollouts").glob("*.parquet")))
    assert "config.yaml is missing, or no file" in build_report(run).read_text()
