"""How the ranks of one world learn where rank 0 listens. No process group is made here: `policy.distributed` does that.

Rank 0 first binds a port that the system chooses, then tells host and port; so no port is guessed, and two runs on one
machine cannot meet on the same one.

    torchrun         has told all ranks already (MASTER_ADDR, MASTER_PORT): nothing is left to do
    MPI              one message from rank 0 to each other rank, after which MPI is finalised
    Slurm, launcher  a file in the run directory, which the nodes share anyway for checkpoints and weights

Waits for: rank 0's message or file, and then for its port to answer, until the deadline. What a file says is believed
only when the store behind the port knows the file's key: a file that an earlier attempt left is passed over.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from megatron_rl.files import write_atomic

CONNECT_S = 5.0
"""How long one host name may take to answer before the next one is tried."""


class MeetingError(RuntimeError):
    """The ranks did not find each other in time; the message says who waited for what."""


class Store(Protocol):
    """What a meeting needs of torch's key-value store."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...


S = TypeVar("S", bound=Store)
Serve = Callable[[], tuple[S, int]]
"""Opens a store on a free port of this machine; returns it and the port."""
Connect = Callable[[str, int, float], S]
"""Connects to the store at host and port within so many seconds; raises ConnectionError."""


class Meeting(Protocol):
    """One way to meet."""

    def meet(self, serve: Serve[S], connect: Connect[S], timeout_s: float) -> S:
        """The store of all ranks, served by rank 0. Raises MeetingError when it is not found within `timeout_s`."""
        ...


@dataclass(frozen=True)
class Address:
    """Where rank 0 listens: host names under which it may be known to others, best first."""

    hosts: list[str]
    port: int
    key: str


def serve_at(serve: Serve[S], node: str | None) -> tuple[S, Address]:
    """Rank 0's half: a store that knows the key of its address. `node`: Slurm's name of this machine."""
    store, port = serve()
    names = dict.fromkeys(name for name in (node, socket.gethostname(), socket.getfqdn()) if name)
    address = Address(list(names), port, uuid.uuid4().hex)
    store.set("address", address.key)
    return store, address


def connect_to(address: Address, connect: Connect[S], timeout_s: float) -> S:
    """The others' half. Raises ConnectionError with what each host name answered."""
    refused = []
    for host in address.hosts:
        try:
            socket.create_connection((host, address.port), timeout=CONNECT_S).close()
            store = connect(host, address.port, timeout_s)
            if store.get("address").decode() == address.key:
                return store
            refused.append(f"{host}:{address.port} belongs to another run")
        except OSError as error:
            refused.append(f"{host}:{address.port} {error}")
    raise ConnectionError("; ".join(refused))


@dataclass(frozen=True)
class InRunDir:
    """Meets through `file`, in a directory that all nodes share."""

    file: Path
    rank: int
    who: str
    """The world in words, for messages."""
    node: str | None = None

    def meet(self, serve: Serve[S], connect: Connect[S], timeout_s: float) -> S:
        """Raises MeetingError when rank 0 has not published an address that works within `timeout_s`."""
        if self.rank == 0:
            store, address = serve_at(serve, self.node)
            write_atomic(self.file, json.dumps(vars(address)))
            return store
        deadline = time.monotonic() + timeout_s
        problem = "the file does not exist"
        while (left := deadline - time.monotonic()) > 0:
            published = self._read()
            if published is not None:
                try:
                    return connect_to(published, connect, left)
                except ConnectionError as error:
                    problem = str(error)
            time.sleep(0.2)
        raise MeetingError(
            f"rank {self.rank} of {self.who} waited {timeout_s:.0f} s for rank 0, which writes {self.file} and "
            f"listens: {problem}. See rank 0's log; else the nodes do not share run_dir, or a firewall is between them"
        )

    def _read(self) -> Address | None:
        with contextlib.suppress(OSError):
            os.listdir(self.file.parent)  # on NFS it is this that makes a new file visible
            return Address(**json.loads(self.file.read_text()))
        return None


@dataclass(frozen=True)
class ThroughMpi:
    """Meets by one message from rank 0 to each other rank; MPI is finalised afterwards, the ranks go on without it."""

    comm: Any
    finalize: Callable[[], None]

    def meet(self, serve: Serve[S], connect: Connect[S], timeout_s: float) -> S:
        """Raises MeetingError when rank 0 sends nothing within `timeout_s`, or its address does not work."""
        if self.comm.rank == 0:
            store, address = serve_at(serve, None)
            for request in [self.comm.isend(address, dest) for dest in range(1, self.comm.size)]:
                request.wait()
            self.finalize()
            return store
        address = self._receive(timeout_s)
        self.finalize()
        try:
            return connect_to(address, connect, timeout_s)
        except ConnectionError as error:
            raise MeetingError(f"a rank cannot reach rank 0: {error}; is a firewall between them?") from error

    def _receive(self, timeout_s: float) -> Address:
        request, deadline = self.comm.irecv(source=0), time.monotonic() + timeout_s
        while True:
            arrived, address = request.test()
            if arrived:
                return address
            if time.monotonic() > deadline:
                raise MeetingError(
                    f"rank {self.comm.rank} waited {timeout_s:.0f} s for rank 0 to send its address by MPI; see its log"
                )
            time.sleep(0.01)
