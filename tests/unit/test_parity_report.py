"""What is said of a comparison follows from what was tried, and numbers are plain sums."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from megatron_rl.config import Config
from megatron_rl.parity import check_parity
from megatron_rl.parity_report import Evidence, Gap, causes, table
from tests.least import least


def gap(mean_abs: float = 1.0, *, mean: float = 0.0, std: float = 1.0, outside: float = 0.0) -> Gap:
    return Gap(100, mean_abs, 5 * mean_abs, mean, std, 0.0, outside, 1.0)


GOOD = gap(1e-6)
AGREES = Evidence(16, 0.8, "float32", "float32", GOOD, 0.5, None)
BF16 = replace(AGREES, trainer_dtype="bfloat16", engine_dtype="bfloat16", gap=gap(0.2), scored=gap(0.2))


@given(arrays(np.float64, st.tuples(st.just(2), st.integers(1, 30)), elements=st.floats(-5, 0)))
def test_a_gap_is_made_of_plain_sums(log_probs: np.ndarray):
    trainer, engine = log_probs
    found, d = Gap.of(trainer, engine), trainer - engine
    rho = np.exp(d)
    expected = [len(d), np.abs(d).mean(), np.abs(d).max(), d.mean(), d.std(), (rho - 1 - d).mean()]
    expected += [np.mean((rho < 0.8) | (rho > 1.25)), rho.sum() ** 2 / (len(d) * (rho**2).sum())]
    assert list(vars(found).values()) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("evidence", "names", "says"),
    [
        (AGREES, [], ""),
        (replace(AGREES, gap=gap(0.02), trainer_dtype="bfloat16"), [], ""),
        (replace(AGREES, likelier=9.0), ["top-p"], "likelier than they should be by 9"),
        (replace(AGREES, likelier=-9.0), ["top-p"], "less likely"),
        (replace(AGREES, other_tokens="9 arrived as 8"), ["tokens"], "9 arrived as 8"),
        (
            replace(AGREES, gap=gap(0.3), scored=GOOD, fitted=GOOD, fitted_temperature=0.5),
            ["temperature"],
            "fit temperature 0.5 (gap 1.0e-06), not rollout.temperature=0.8 (gap 3.0e-01)",
        ),
        (replace(AGREES, gap=gap(0.3), scored=GOOD, fitted=gap(0.2), above=1.0), ["top-p"], "100% at least as likely"),
        (replace(AGREES, gap=gap(0.3), scored=GOOD, fitted=gap(0.2), above=0.6), ["sampling"], "penalties"),
        (
            replace(AGREES, gap=gap(), scored=gap(), changed=["a.weight"], reloaded=GOOD),
            ["weights"],
            "1 parameters changed when it read them again, first a.weight, and the gap went from 1.0e+00 to 1.0e-06",
        ),
        (
            replace(
                AGREES, engine_dtype="bfloat16", gap=gap(), scored=gap(), changed=["a"], reloaded=gap(0.01),
                rounded=gap(0.003),
            ),
            ["weights", "dtype"],
            "set engine.dtype=float32",
        ),
        (replace(AGREES, gap=gap(), scored=gap(0.5, mean=-0.5, std=0.01)), ["vocabulary"], "nearly the same -0.5"),
        (replace(BF16, fp32_head=False), ["head"], "--enable-fp32-lm-head"),
        (replace(BF16, fp32_head=True), ["model code"], "rope, norms, attention"),
        (replace(BF16, fp32_head=True), ["model code"], "weights not read again (see --reload-engine)"),
        (replace(AGREES, gap=gap(), scored=gap(), changed=[], reloaded=gap()), ["model code"], "differ by 1.0e+00"),
    ],
)  # fmt: skip
def test_a_cause_is_named_by_what_shows_it(evidence: Evidence, names: list[str], says: str):
    found = list(causes(evidence))
    assert [cause.name for cause in found] == names
    assert says in " ".join(cause.says for cause in found)


def test_evidence_survives_the_trip_through_a_file(tmp_path: Path):
    evidence = replace(AGREES, scored=gap(0.5), changed=["a"])
    evidence.write(tmp_path / "parity.json")
    assert Evidence.read(tmp_path / "parity.json") == evidence


def test_the_table_shows_what_was_tried_and_nothing_else():
    assert "mean |Δ log p|, scored at temperature 1" not in dict(table(AGREES))
    assert dict(table(replace(AGREES, scored=gap(0.5))))["mean |Δ log p|, scored at temperature 1"] == "5.000e-01"
    assert dict(table(AGREES))["effective sample size"] == "1.000000"


@pytest.mark.parametrize(
    ("values", "asked", "reloads"),
    [
        ({}, False, True),
        ({"engine": {"urls": ["http://in-use:1"]}}, False, False),
        ({"engine": {"urls": ["http://in-use:1"]}}, True, True),
    ],
)
def test_a_server_that_may_be_in_use_reads_weights_again_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], asked: bool, reloads: bool
):
    told: list[str] = []

    def run_ranks(cfg: Config, module: str, *words: str) -> None:
        told.extend(words)
        AGREES.write(Path(words[1]))

    monkeypatch.setattr("megatron_rl.cluster.local.run_ranks", run_ranks)
    cfg = least(run_dir=str(tmp_path), **values)
    assert check_parity(cfg, 16, asked) == AGREES
    assert ("--reload-engine" in told) == reloads
