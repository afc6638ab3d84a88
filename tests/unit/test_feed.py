"""What rank 0 makes of a step's status while it waits for rollouts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_rl import feed
from megatron_rl.cluster.rank_zero import RankZero
from megatron_rl.rollout.pull import StepStatus
from tests.parallel.policy_setup import make_config

NEEDY = ["http://b:1"]


def rollouts(monkeypatch: pytest.MonkeyPatch, status: StepStatus) -> feed.RolloutFeed:
    """Those of a controller that always says this."""

    def wait_ready(
        step: int, timeout_s: float, interrupted: Callable[[], bool], enough: Callable[[StepStatus], bool]
    ) -> StepStatus:
        return status

    monkeypatch.setattr(feed, "data_parallel_rank", lambda: 0)
    monkeypatch.setattr(feed, "is_data_parallel_leader", lambda: True)
    client: Any = SimpleNamespace(wait_ready=wait_ready)
    zero = RankZero(dist.HashStore(), 0)  # type: ignore[attr-defined]
    return feed.RolloutFeed(make_config("model"), client, zero)


def wait(rollouts: feed.RolloutFeed) -> list[str] | None:
    return rollouts.wait(0, lambda: False, lambda: False)


def test_engines_that_need_weights_get_them_also_when_no_step_waits_for_rollouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always_ready = rollouts(monkeypatch, StepStatus("ready", needs_weights=NEEDY))
    assert wait(always_ready) == NEEDY
    assert wait(always_ready) == []  # it was just tried


def test_a_batch_that_is_ready_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wait(rollouts(monkeypatch, StepStatus("ready"))) == []
