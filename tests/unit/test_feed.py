"""What rank 0 makes of a step's status while it waits for rollouts, and what ranks make of their share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron_rl import feed
from megatron_rl.cluster.rank_zero import RankZero
from megatron_rl.rollout.pull import StepStatus
from megatron_rl.rollout.sample import Group, Span
from megatron_rl.rollout.wire import RolloutShard
from megatron_rl.routes import RouteStore
from tests.parallel.policy_setup import make_config

NEEDY = ["http://b:1"]


def rollouts(
    monkeypatch: pytest.MonkeyPatch, *statuses: StepStatus, say: Callable[[str], None] = lambda line: None
) -> feed.RolloutFeed:
    """Those of a controller that says this, the last of it again and again."""

    def wait_ready(
        step: int, timeout_s: float, interrupted: Callable[[], bool], enough: Callable[[StepStatus], bool]
    ) -> StepStatus:
        for status in statuses:
            enough(status)
        return statuses[-1]

    monkeypatch.setattr(feed, "data_parallel_rank", lambda: 0)
    monkeypatch.setattr(feed, "is_data_parallel_leader", lambda: True)
    client: Any = SimpleNamespace(wait_ready=wait_ready)
    zero = RankZero(dist.HashStore(), 0)  # type: ignore[attr-defined]
    return feed.RolloutFeed(make_config("model"), client, zero, say, lambda: False, lambda: False)


def test_engines_that_need_weights_get_them_also_when_no_step_waits_for_rollouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always_ready = rollouts(monkeypatch, StepStatus("ready", needs_weights=NEEDY))
    assert always_ready.wait(0) == NEEDY
    assert always_ready.wait(0) == []  # it was just tried


def test_a_batch_that_is_ready_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rollouts(monkeypatch, StepStatus("ready")).wait(0) == []


def test_engines_that_go_out_and_come_back_are_told_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = ["not looked at yet", "", "connection refused", "holds version 1", ""]
    statuses = [StepStatus("ready", engines={"http://a": "", "http://b": reason}) for reason in reasons]
    told: list[str] = []
    rollouts(monkeypatch, *statuses, say=told.append).wait(0)
    assert told == [
        "WARNING engine http://b is out (1 of 2 engines serve): connection refused",
        "INFO engine http://b serves (2 of 2 engines serve)",
    ]


def test_the_routes_of_a_shard_are_read_from_the_run_when_they_are_used(tmp_path: Path) -> None:
    store = RouteStore(tmp_path, 2, 1, 9)
    group = Group.start(1, "p", np.arange(2), 2, run_seed=0, version=0, temperature=1.0)
    for k, sample in enumerate(group.samples):
        rows = np.full((3, 2, 1), 3 + k)
        sample.append([1, 2], [-1.0, -1.0], [Span(0, 0, 2)], store.append(rows, 0))
    blob = RolloutShard.of(group.samples[::-1]).to_bytes()
    routes = feed._sequence_batch(blob, RouteStore(tmp_path, 2, 1, 9)).routes
    assert routes is not None
    assert routes.rows(0, [1], 1, 4).tolist() == [[[4], [4], [-1]]]
    assert routes.select([1]).rows(0, [0, 1], 0, 1).tolist() == [[[3]], [[3]]]
    assert feed._sequence_batch(blob, None).routes is None
