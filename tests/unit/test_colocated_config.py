"""Which settings engines and trainer on shared devices refuse, and which they take."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl.config.checks import _off_policy, _weight_transport
from tests.least import least

SGLANG = {"kind": "sglang", "replicas": 2, "tp": 2}


def complaints(**sections: dict[str, Any]) -> list[str]:
    """What is said of a run with four trainer ranks on shared devices."""
    ranks = {"tensor_model_parallel_size": 2, "data_parallel_size": 2}
    cluster = {"placement": "colocated", **sections.pop("cluster", {})}
    cfg = least(parallel=ranks, cluster=cluster, **sections)
    return [*_off_policy(cfg), *_weight_transport(cfg)]


@pytest.mark.parametrize(
    "sections",
    [
        {"engine": SGLANG},
        {"engine": SGLANG | {"weight_transport": "ipc"}},
        {"engine": SGLANG | {"weight_transport": "disk"}, "rollout": {"partial_rollouts": True}},
        {"engine": SGLANG | {"weight_transport": "broadcast"}, "cluster": {"device": "cpu"}},
        {"engine": SGLANG | {"weight_transport": "ipc", "tp": 4}, "cluster": {"device": "cpu"}},
    ],
)
def test_turns_go_with_synchronous_rollouts_and_every_transport_that_can_reach_the_engines(
    sections: dict[str, Any],
) -> None:
    assert complaints(**sections) == []


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"rollout": {"mode": "async"}},
            "rollout.mode=async: with cluster.placement=colocated engines and trainer take",
        ),
        ({"rollout": {"mode": "one_step_off"}}, "rollout.mode=one_step_off: with cluster.placement=colocated"),
        ({"engine": SGLANG | {"weight_transport": "broadcast"}}, "NCCL admits no two ranks on one device; use"),
        (
            {"engine": SGLANG | {"weight_transport": "ipc", "tp": 4}},
            "engine.replicas=2 x engine.tp=4 = 8 devices are more than the 4 of the trainer",
        ),
    ],
)
def test_others_are_refused_before_anything_starts(sections: dict[str, Any], message: str) -> None:
    (found,) = complaints(**sections)
    assert message in found
