"""On a GPU: with Transformer Engine's kernels in bf16, training uses the experts that were recorded or reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.parallel.launch import run_ranks
from tests.parallel.replay_cases import MODES, Case, run_cases, write_models

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
CASES = {
    "as it comes": Case({}, dtype="bfloat16"),
    "layers recomputed": Case({"recompute": "full"}, dtype="bfloat16"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    paths = {"qwen3_moe": write_models(tmp_path_factory.mktemp("models"), "qwen3_moe", **SIZES)}
    return dict(run_ranks(1, run_cases, paths, CASES, timeout=600)[0])


@pytest.mark.parametrize("name", CASES)
def test_the_experts_used_are_the_recorded_ones_and_the_engines(found: dict[str, Any], name: str) -> None:
    routes = found[name]["engine_routes"]
    known = routes[..., 0] >= 0
    replayed = found[name]["R3"]["use"]["forward"].sets[known]
    assert (replayed.nonzero()[1] == np.sort(routes[known], axis=-1).ravel()).all()
    old, now = (found[name]["R2"][when]["forward"].sets for when in ("old_use", "use"))
    assert (old == now).all()
    old, now = (found[name]["off"][when]["forward"].sets for when in ("old_use", "use"))
    assert (old != now).any()


def test_recomputation_uses_the_experts_of_the_forward_pass(found: dict[str, Any]) -> None:
    for mode in MODES:
        use = found["layers recomputed"][mode]["use"]
        assert (use["forward"].sets == use["recomputed"].sets).all(), mode


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_the_ratio_is_one_within_what_kernels_round(found: dict[str, Any], name: str, mode: str) -> None:
    metrics = found[name][mode]["same_metrics"]
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=0.02)
    assert metrics["policy/kl_old"] < 1e-3
    assert metrics["optimizer/skipped"] == 0
