"""How ranks find rank 0: what is published is bound already, and nothing that an earlier start left is believed."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cluster.meeting import InRunDir, MeetingError, ThroughMpi, serve_at


class Stores:
    """Stores of this process, each behind a real listening socket."""

    def __init__(self) -> None:
        self.by_port: dict[int, Store] = {}
        self.sockets = ExitStack()

    def serve(self) -> tuple[Store, int]:
        listener = self.sockets.enter_context(socket.create_server(("", 0)))
        port = listener.getsockname()[1]
        self.by_port[port] = Store()
        return self.by_port[port], port

    def connect(self, host: str, port: int, timeout_s: float) -> Store:
        return self.by_port[port]


class Store(dict[str, str]):
    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()


@pytest.fixture
def stores() -> Iterator[Stores]:
    made = Stores()
    with made.sockets:
        yield made


def meet(stores: Stores, file: Path, rank: int, timeout_s: float = 20.0) -> Store:
    return InRunDir(file, rank, "the 2 that srun started").meet(stores.serve, stores.connect, timeout_s)


def test_ranks_that_come_first_wait_for_rank_0(stores: Stores, tmp_path: Path) -> None:
    found: list[Store] = []
    waiting = threading.Thread(target=lambda: found.append(meet(stores, tmp_path / "new" / "a.json", 1)))
    waiting.start()
    store = meet(stores, tmp_path / "new" / "a.json", 0)
    waiting.join()
    assert found == [store]
    assert found[0] is store


def test_the_address_of_another_world_is_passed_over(stores: Stores, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    other = meet(stores, file, 0)
    left = json.loads(file.read_text())
    other["address"] = "what the world now behind that port calls itself"
    with pytest.raises(MeetingError, match=f"{left['port']} belongs to another run"):
        meet(stores, file, 1, timeout_s=0.1)
    ours = meet(stores, file, 0)
    assert meet(stores, file, 1) is ours


def test_the_address_of_a_world_that_has_ended_is_passed_over(stores: Stores, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    meet(stores, file, 0)
    stores.sockets.close()
    with pytest.raises(MeetingError, match="refused"):
        meet(stores, file, 1, timeout_s=0.1)


def test_a_rank_0_that_never_comes_is_named_with_the_file(stores: Stores, tmp_path: Path) -> None:
    with pytest.raises(MeetingError) as refusal:
        meet(stores, tmp_path / "a.json", 1, timeout_s=0.1)
    for word in ("rank 1 of the 2 that srun started", "a.json", "does not exist", "do not share run_dir"):
        assert word in str(refusal.value)


def test_a_host_name_that_others_cannot_resolve_is_no_hindrance(stores: Stores, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    store = meet(stores, file, 0)
    published = json.loads(file.read_text())
    file.write_text(json.dumps(published | {"hosts": ["no-such-host.invalid", *published["hosts"]]}))
    assert meet(stores, file, 1) is store


def test_slurms_name_of_the_node_comes_before_the_machines_own(stores: Stores) -> None:
    _, address = serve_at(stores.serve, "node7")
    assert address.hosts[:2] == ["node7", socket.gethostname()]


class SilentRank0:
    """MPI's world in which rank 0 hangs before it sends anything."""

    rank, size = 1, 2

    def irecv(self, source: int) -> SilentRank0:
        return self

    def test(self) -> tuple[bool, Any]:
        return False, None


def test_a_message_that_never_comes_ends_at_the_deadline(stores: Stores) -> None:
    with pytest.raises(MeetingError, match=r"rank 1 waited 0 s for rank 0"):
        ThroughMpi(SilentRank0(), finalize=pytest.fail).meet(stores.serve, stores.connect, 0.1)
