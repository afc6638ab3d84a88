"""What a rank says when another one does not take part in a collective: its own words, not those of gloo."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.parallel.launch import run_ranks

pytestmark = pytest.mark.parallel


def wait_for_an_absent_rank() -> dict[str, str | None]:
    """Rank 0: what it says of a collective that rank 1 leaves out, and of a failure of its own."""
    import torch
    import torch.distributed as dist

    from megatron_rl.policy.distributed import peer_failure

    dist.init_process_group("gloo")
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    errors: dict[str, RuntimeError] = {}
    if dist.get_rank() == 0:
        try:
            dist.barrier(group)
        except RuntimeError as error:
            errors["absent"] = error
        try:
            torch.zeros(2) @ torch.zeros(3)
        except RuntimeError as error:
            errors["own"] = error
    dist.barrier()  # rank 1 stays until here, without the other collective
    dist.destroy_process_group()  # as a session does before its error is put in words
    return {name: peer_failure(error) for name, error in errors.items()}


def test_a_rank_that_was_left_alone_says_so() -> None:
    said = run_ranks(2, wait_for_an_absent_rank)[0]
    assert said["absent"] is not None
    assert "this rank was left alone" in said["absent"]
    assert "Timed out waiting 1000ms" in said["absent"]
    assert "cluster.collective_timeout_s" in said["absent"]
    assert said["own"] is None
