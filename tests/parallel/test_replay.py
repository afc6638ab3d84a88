"""Replayed routing is exact, its gradients do not depend on the layout, and it does what it is for.

Experts are compared as the dispatcher was given them, token by token and layer by layer, never as replay holds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.parallel.launch import run_ranks
from tests.parallel.policy_setup import CP2, DP2, DP4, EP2, EP4, ETP2, PP2, SP, TP2, VPP2
from tests.parallel.replay_cases import FAMILIES, LAYERS, Case, Used, run_cases, whole_batch, write_models
from tests.worst import worst

pytestmark = pytest.mark.parallel

SP2 = TP2 | SP
TWO = {
    "EP2": Case(DP2 | EP2),
    "EP2, layers recomputed": Case(DP2 | EP2 | {"recompute": "full"}, modes=("R2", "R3")),
    "TP2 SP EP2": Case(SP2 | EP2 | {"recompute": "selective"}),
    "TP2 SP ETP2": Case(SP2 | ETP2),
    "PP2 VPP2, layers recomputed": Case(VPP2 | {"recompute": "full"}),
    "CP2": Case(CP2),
    "CP2 EP2": Case(CP2 | EP2),
    "DeepSeek, TP2 SP EP2": Case(SP2 | EP2, "deepseek_v3"),
    "DeepSeek, PP2 VPP2": Case(VPP2, "deepseek_v3"),
}
FOUR = {
    "EP4": Case(DP4 | EP4),
    "TP2 SP EP2 DP2": Case(SP2 | DP2 | EP2),
    "TP2 SP EP4 DP2": Case(SP2 | DP2 | EP4),
    "PP2 EP2": Case(PP2 | DP2 | EP2),
    "PP2 VPP2 EP2, layers recomputed": Case(VPP2 | DP2 | EP2 | {"recompute": "full"}),
    "CP2 EP2 DP2": Case(CP2 | DP2 | EP2),
    "CP2 TP2 SP EP2": Case(CP2 | SP2 | EP2),
    "CP2 PP2 EP2": Case(CP2 | PP2 | EP2),
    "DeepSeek, EP4": Case(DP4 | EP4, "deepseek_v3"),
    "DeepSeek, CP2 EP2 DP2": Case(CP2 | DP2 | EP2, "deepseek_v3"),
    "DeepSeek, PP2 EP2, layers recomputed": Case(PP2 | DP2 | EP2 | {"recompute": "full"}, "deepseek_v3"),
    "DeepSeek, PP4: the first stage has no experts": Case({"pipeline_model_parallel_size": 4}, "deepseek_v3"),
    "PP2 TP2 SP ETP2": Case(PP2 | SP2 | ETP2),
}
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("models")
    return {family: write_models(folder, family) for family in FAMILIES}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def launch(request, paths) -> tuple[dict[str, Case], dict[str, list[dict[str, Any]]]]:
    """Cases of one number of ranks, and case -> what each rank found; a family's name: one rank by itself."""
    cases = {2: TWO, 4: FOUR}[request.param]
    by_rank = run_ranks(request.param, run_cases, paths, cases, timeout=300)
    references = {family: Case({}, family) for family in FAMILIES}
    found = {name: [rank[name] for rank in by_rank] for name in cases}
    return references | cases, found | {family: [by_rank[0][family]] for family in FAMILIES}


def of_all_ranks(ranks: list[dict[str, Any]], mode: str, when: str, kind: str = "forward") -> Used:
    total = Used.empty(*ranks[0]["engine_routes"].shape[:2])
    for rank in ranks:
        if kind in rank[mode][when]:  # else its stage has no experts
            total = total + rank[mode][when][kind]
    return total


def read_rows() -> np.ndarray:
    """bool [T], every token but the last one of each sequence."""
    batch = whole_batch()
    read = np.ones(batch.num_tokens, np.bool_)
    read[batch.offsets[1:] - 1] = False
    return read


def given_sets(routes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bool [layers, T] where there are any, and bool [layers, T, experts]."""
    known = routes[..., 0] >= 0
    sets = np.zeros((*routes.shape[:2], 8), np.bool_)
    np.put_along_axis(sets, np.where(routes >= 0, routes, 0).astype(np.int64), True, axis=-1)
    return known, sets & known[..., None]


def each_case(launch: Any) -> Iterator[tuple[str, str, list[dict[str, Any]], dict[str, Any]]]:
    """Name, mode, what each rank found, and the reference."""
    cases, found = launch
    for name, case in cases.items():
        for mode in case.modes:
            yield f"{name}, {mode}", mode, found[name], found[case.family][0]


def test_each_token_is_routed_once_in_each_layer_whatever_the_layout(launch):
    for name, mode, ranks, _ in each_case(launch):
        for when in ("old_use", "use"):
            count = of_all_ranks(ranks, mode, when).count
            assert (count == np.broadcast_to(read_rows(), count.shape)).all(), (name, when)


def test_the_experts_used_are_the_recorded_ones_and_the_engines(launch):
    read = read_rows()
    for name, mode, ranks, _ in each_case(launch):
        old, now = (of_all_ranks(ranks, mode, when).sets for when in ("old_use", "use"))
        known, engine = given_sets(ranks[0]["engine_routes"])
        if mode == "R2":
            assert (now == old).all(), name
        elif mode == "R3":
            assert (now[known] == engine[known]).all(), name
            assert (old[known] == engine[known]).all(), name
            assert (now != old).any(-1)[~known & read].any(), f"{name}: nothing routes live"
        else:
            assert 0.03 < (now != old).any(-1)[:, read].mean() < 0.9, f"{name}: the weights moved too little"


def test_recomputation_uses_the_experts_of_the_forward_pass(launch):
    cases, found = launch
    recomputed = [(name, mode) for name, case in cases.items() for mode in case.modes if "recomputed" in name]
    assert recomputed
    for name, mode in recomputed:
        first, again = (of_all_ranks(found[name], mode, "use", kind) for kind in ("forward", "recomputed"))
        assert (first.count == again.count).all(), name
        assert (first.sets == again.sets).all(), name


def test_gradients_are_those_of_one_rank(launch):
    for name, mode, ranks, reference in each_case(launch):
        expected = reference[mode]["gradients"]
        mine = {key: values for rank in ranks for key, values in rank[mode]["gradients"].items()}
        assert mine.keys() == expected.keys()
        # A bias for choosing is no parameter, and an expert that nobody chose has no gradient: both are 0.
        errors = {key: np.abs(mine[key] - e).max() / (np.abs(e).max() or 1.0) for key, e in expected.items()}
        assert worst(errors.values()) <= TOLERANCE, (name, max(errors, key=errors.get))


def test_routers_learn_under_replay(launch):
    for name, mode, _, reference in each_case(launch):
        grads = [g for key, g in reference[mode]["gradients"].items() if key.endswith("mlp.gate.weight")]
        assert len(grads) == len(reference["engine_routes"])
        assert min(np.abs(grad).max() for grad in grads) > 1e-6, name


def test_with_the_same_weights_and_micro_batches_the_ratio_is_one_bit_for_bit(launch):
    for name, mode, ranks, _ in each_case(launch):
        for rank in ranks:
            metrics = rank[mode]["same_metrics"]
            assert metrics["policy/ratio_mean"] == 1.0, name
            assert metrics["policy/kl_old"] == 0.0, name


def test_other_micro_batches_change_the_ratio_by_rounding_only(launch):
    for name, mode, _, reference in each_case(launch):
        found = reference[mode]["other_microbatches"]
        assert found["policy/ratio_mean"] == pytest.approx(1.0, abs=TOLERANCE), name
        assert found["routing/mismatch_old"] == 0.0, name


def test_replay_brings_the_moved_policy_nearer_to_what_the_engine_computed(launch):
    """The engine's log-probs are those of its own experts: the old pass under R3."""
    for family in FAMILIES:
        (found,) = launch[1][family]
        gaps = {
            mode: np.abs(found[mode]["moved_log_probs"] - found["R3"]["engine_log_probs"]).mean()
            for mode in ("off", "R3")
        }
        assert gaps["R3"] < 0.8 * gaps["off"], (family, gaps)


def test_metrics_of_the_routing_are_the_same_in_every_layout(launch):
    for name, mode, ranks, reference in each_case(launch):
        for rank in ranks:
            for kind in ("old_metrics", "same_metrics", "metrics"):
                expected = {k: v for k, v in reference[mode][kind].items() if k.startswith("routing/")}
                mine = {k: v for k, v in rank[mode][kind].items() if k.startswith("routing/")}
                assert mine == pytest.approx(expected, rel=1e-5), (name, kind)


def test_mismatch_is_the_share_of_tokens_and_layers_with_other_experts(launch):
    batch, read = whole_batch(), read_rows()
    (reference,) = launch[1]["qwen3_moe"]
    known, engine = given_sets(reference["engine_routes"])
    live = of_all_ranks([reference], "off", "old_use").sets
    differs = (live != engine).any(-1) & known
    expected = [
        differs[:, a:b].sum() / n if (n := known[:, a:b].sum()) else np.nan
        for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
    ]
    assert reference["off"]["old_metrics"]["routing/mismatch_engine"] == pytest.approx(differs.sum() / known.sum())
    assert reference["off"]["old_metrics"]["routing/mismatch_engine_max"] == pytest.approx(np.nanmax(expected))
    assert reference["off"]["old_metrics"]["routing/rejected_sequences"] == (np.array(expected) > 0.3).sum() > 0
    by_layer = [reference["off"]["old_metrics"][f"routing/mismatch_engine_layer_{i}"] for i in range(LAYERS)]
    assert by_layer == pytest.approx((differs.sum(1) / known.sum(1)).tolist())
    for name, mode, ranks, mine in each_case(launch):
        if mode == "R3" or mine is not reference:
            continue  # under R3, routers see what replayed experts of earlier layers made of a token
        for rank in ranks:
            assert rank[mode]["mismatch"] == pytest.approx(
                [expected[i] for i in rank[mode]["sequences"]], nan_ok=True
            ), name
    moved = (of_all_ranks([reference], "off", "use").sets != live).any(-1)[:, read].mean()
    assert reference["off"]["metrics"]["routing/mismatch_old"] == pytest.approx(moved)
    assert reference["off"]["same_metrics"]["routing/mismatch_old"] == 0.0
    assert moved <= reference["off"]["metrics"]["routing/mismatch_old_max"] <= 1
    assert reference["off"]["same_metrics"]["routing/mismatch_old_max"] == 0.0
    assert reference["R3"]["metrics"]["routing/live_rows"] == (~known[0] & read).sum()
    assert reference["R2"]["metrics"]["routing/live_rows"] == 0
    assert "routing/live_rows" not in reference["off"]["metrics"]
