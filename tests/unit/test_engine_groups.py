"""Process groups whose trainer does not come, or does not send: no wait is for ever."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from megatron_rl.cluster.ports import free_port
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
        groups.receive("g", ENTRIES, False)


def test_tensors_that_do_not_come_are_given_up_and_named() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    groups = Groups(timeout_s=0.5)
    joining = threading.Thread(target=groups.join, args=("127.0.0.1", store.port, 1, 2, "g"))
    joining.start()
    trainer = dist.ProcessGroupGloo(PrefixStore("cpu/", PrefixStore("g/", PrefixStore("g", store))), 0, 2)
    joining.join()
    with pytest.raises(WeightsError, match="Failed to receive weights: first to second from group 'g'"):
        groups.receive("g", ENTRIES, True)
    with pytest.raises(WeightsError, match="'g': must not be empty, nor the name of a group that exists"):
        groups.join("127.0.0.1", store.port, 1, 2, "g")
    groups.leave("g")
    with pytest.raises(WeightsError, match="does not exist: 'g'"):
        groups.leave("g")
    assert trainer.size() == 2


@pytest.mark.parametrize("flattened", [False, True])
def test_tensors_come_as_they_were_announced(flattened: bool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    groups = Groups(timeout_s=30)
    joining = threading.Thread(target=groups.join, args=("127.0.0.1", store.port, 1, 2, "g"))
    joining.start()
    trainer = dist.ProcessGroupGloo(PrefixStore("cpu/", PrefixStore("g/", PrefixStore("g", store))), 0, 2)
    joining.join()
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])]
    parts = [torch.cat(tensors).view(torch.uint8)] if flattened else tensors
    options = dist.BroadcastOptions()
    options.rootRank = 0
    works = [trainer.broadcast([part], options) for part in parts]  # type: ignore[attr-defined]
    found = groups.receive("g", ENTRIES, flattened)
    for work in works:
        work.wait()
    assert [name for name, _ in found] == ["first", "second"]
    assert all(torch.equal(a, b) for (_, a), b in zip(found, tensors, strict=True))
