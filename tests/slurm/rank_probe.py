"""A rank that only finds its place and meets the others, without torch, which costs seconds to import in each process.

Writes what it found to a file of its own, since lines that ranks print together run into each other.
Usage: python -m tests.slurm.rank_probe FOLDER
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
from pathlib import Path

from megatron_rl.cluster.bootstrap import find_place
from megatron_rl.cluster.started import BootstrapError

WAIT_S = 60.0


class Store:
    """Text under names, held by rank 0: every connection is answered with all of it."""

    def __init__(self, host: str, port: int) -> None:
        self.address, self.held = (host, port), {}

    def set(self, key: str, value: str) -> None:
        self.held[key] = value

    def get(self, key: str) -> bytes:
        with socket.create_connection(self.address, timeout=WAIT_S) as connection:
            return json.load(connection.makefile())[key].encode()


def serve() -> tuple[Store, int]:
    listener = socket.create_server(("", 0))
    port = listener.getsockname()[1]
    store = Store("127.0.0.1", port)

    def answer() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(json.dumps(store.held).encode())

    threading.Thread(target=answer, daemon=True).start()
    return store, port


def connect(host: str, port: int, timeout_s: float) -> Store:
    return Store(host, port)


def wait_for_all(folder: Path, world: str, rank: int, world_size: int) -> None:
    """Rank 0 answers questions, so it stays until the others have asked."""
    (folder / f"{world}-{rank}").touch()
    deadline = threading.Event()
    threading.Timer(WAIT_S, deadline.set).start()
    while len(list(folder.glob(f"{world}-*"))) < world_size and not deadline.wait(0.05):
        pass


def main() -> None:
    logging.basicConfig(format="%(message)s")
    folder = Path(sys.argv[1])
    try:
        place = find_place(os.environ, folder)
    except BootstrapError as refusal:
        sys.exit(f"REFUSED {refusal}")
    store = place.meeting.meet(serve, connect, WAIT_S) if place.meeting else None
    world = store.get("address").decode() if store else f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    facts = {"rank": place.rank, "world_size": place.world_size, "local_rank": place.local_rank}
    found = folder / f"rank-{os.getpid()}.json"  # the emulated nodes share one set of ids
    found.write_text(json.dumps(facts | {"node": socket.gethostname(), "world": world}))
    if store:
        wait_for_all(folder, world, place.rank, place.world_size)
    os._exit(0)  # past the timer


if __name__ == "__main__":
    main()
