"""Process groups whose trainer does not come, or does not send: no wait is for ever."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from megatron_rl.addresses import free_port
from megatron_rl.engines.embedded.groups import Groups
from megatron_rl.engines.embedded.weights import WeightsError
from megatron_rl.engines.embedded.wire_tensors import entries_of

ENTRIES = entries_of(["first", "second"], ["float32", "float32"], [[2], [3]])


def test_a_trainer_that_does_not_come_is_given_up_and_the_name_is_free_again() -> None:
    groups, port = Groups(timeout_s=0.3), free_port()
    for _ in range(2):
        with pytest.raises(WeightsError, match="Failed to initialize custom process group"):
            groups.join("127.0.0.1", port, 1, 2, "g")
    with pytest.raises(WeightsError, match=r"'g' is not among \[\]"):
        groups.receive("g", ENTRIES)


def test_tensors_that_do_not_come_are_given_up_and_named() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    groups = Groups(timeout_s=0.5)
    joining = threading.Thread(target=groups.join, args=("127.0.0.1", store.port, 1, 2, "g"))
    joining.start()
    trainer = dist.ProcessGroupGloo(PrefixStore("cpu/", PrefixStore("g/", PrefixStore("g", store))), 0, 2)
    joining.join()
    with pytest.raises(WeightsError, match="Failed to receive weights: first to second from group 'g'"):
        groups.receive("g", ENTRIES)
    with pytest.raises(WeightsError, match="'g': must not be empty, nor the name of a group that exists"):
        groups.join("127.0.0.1", store.port, 1, 2, "g")
    groups.leave("g")
    with pytest.raises(WeightsError, match="does not exist: 'g'"):
        groups.leave("g")
    assert trainer.size() == 2
