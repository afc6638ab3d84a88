"""One process group of this rank and some engines, for one weight update; which tensors travel is not known here.

This rank is rank 0 and serves the store in which the members meet; engine number i has the `tp` ranks from 1 + i * tp
on. Everything that may block runs in threads of its own and is awaited with a deadline. A member that fails costs the
whole group: nobody in it can be told apart from one that waits for the others.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from megatron_rl.weights import WeightsError
from megatron_rl.weights.buckets import Bucket
from megatron_rl.weights.transports import Engines, Pending

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
else:
    from torch.distributed import TCPStore

T = TypeVar("T")
log = logging.getLogger(__name__)
Backend = Literal["gloo", "nccl"]
POLL_S = 0.003
CLOSE_S = 5.0
"""How long engines are waited for that leave a group: the next one has another name."""
GRACE_S = 5.0
"""How much longer than a broadcast the engines' answer to it may take beyond the deadline that both have."""


class UpdateGroup:
    """See the module's docstring. `urls` are its engines; `failed` says why the group is of no more use, None = it is.

    Args:
        engines: HTTP.
        urls: at least one.
        tp: tensor-parallel ranks of each engine.
        name: unique among all groups that these engines may ever hear of.
        backend: gloo for buffers on the CPU, nccl for those on devices.
        timeout_s: deadline of meeting, and of each bucket.
        interrupted: whether this rank was told to end.
    """

    def __init__(
        self,
        engines: Engines,
        urls: Sequence[str],
        tp: int,
        name: str,
        backend: Backend,
        timeout_s: float,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.urls, self.name = list(urls), name
        self.failed: dict[str, str] | None = None
        self._engines, self._tp, self._backend, self._timeout_s = engines, tp, backend, timeout_s
        self._interrupted = interrupted
        self._store: TCPStore | None = None
        self._group: Any = None
        self._sending: tuple[Future[None], Pending, float] | None = None

    def join(self) -> None:
        """Meet the engines; afterwards `failed` says whether that worked."""
        world = 1 + len(self.urls) * self._tp
        timeout = timedelta(seconds=self._timeout_s)
        try:
            address = address_towards(self.urls)
        except WeightsError as error:
            self._fail(dict.fromkeys(self.urls, str(error)))
            return
        self._store = TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
        shared = {"master_address": address, "master_port": self._store.port, "world_size": world}
        shared |= {"group_name": self.name, "backend": self._backend}
        bodies = {url: {**shared, "rank_offset": 1 + i * self._tp} for i, url in enumerate(self.urls)}
        calls = self._engines.post("/init_weights_update_group", bodies, self._timeout_s + GRACE_S)
        store, backend = self._store, self._backend
        meeting = in_thread(lambda: _connect(store, world, self.name, backend, timeout))
        deadline = time.monotonic() + self._timeout_s
        if self._await(meeting, calls, deadline, "meeting in a process group"):
            self._group = meeting.result()

    def start(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Announce a bucket and begin to broadcast it; `finish` before the buffer is changed or another one started."""
        if self.failed is not None:
            return
        body = {
            "names": [tensor.name for tensor in bucket.tensors],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.tensors],
            "shapes": [list(tensor.shape) for tensor in bucket.tensors],
            "group_name": self.name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "abort_all_requests": False,
        }
        calls = self._engines.post(
            "/update_weights_from_distributed", dict.fromkeys(self.urls, body), self._timeout_s + GRACE_S
        )
        group, tensor, timeout = self._group, flat[: bucket.nbytes], timedelta(seconds=self._timeout_s)
        sent = in_thread(lambda: _broadcast(group, tensor, timeout))
        self._sending = (sent, calls, time.monotonic() + self._timeout_s)

    def finish(self) -> None:
        """Wait until every engine has loaded the bucket that was started; else the group has failed."""
        if self._sending is not None:
            sent, calls, deadline = self._sending
            self._sending = None
            self._await(sent, calls, deadline, "a bucket of weights")

    def close(self) -> None:
        """Leave the group, and have the engines leave it; what they say to that is of no interest."""
        bodies = {url: {"group_name": self.name} for url in self.urls}
        calls = self._engines.post("/destroy_weights_update_group", bodies, self._timeout_s)
        deadline = time.monotonic() + CLOSE_S
        while self.failed is None and not calls.done and time.monotonic() < deadline and not self._interrupted():
            time.sleep(POLL_S)  # one that has failed may hang: it hears of it when it can
        self._leave()

    def _await(self, ours: Future[Any], calls: Pending, deadline: float, what: str) -> bool:
        """Until our part is done and all engines have answered; the first failure of anybody ends the group."""
        while True:
            failures = {url: str(error) for url, error in calls.so_far().failures.items()}
            if ours.done() and (error := ours.exception()) is not None:
                failures = failures or dict.fromkeys(self.urls, f"{what}: {_in_short(error)}")
            if not failures and time.monotonic() > deadline + GRACE_S * ours.done():
                late = [url for url in self.urls if url not in calls.so_far().answers] or self.urls
                failures = dict.fromkeys(late, f"{what} was not taken within {self._timeout_s:g} s")
            if not failures and self._interrupted():
                failures = dict.fromkeys(self.urls, f"{what}: given up, the run is to end")
            if failures:
                self._fail(failures)
                calls.cancel()
                return False
            if ours.done() and calls.done:
                return True
            time.sleep(POLL_S)

    def _fail(self, reasons: dict[str, str]) -> None:
        first = next(iter(reasons))
        others = f"shares a process group with {first}, which failed: {reasons[first]}"
        self.failed = {url: reasons.get(url, f"engine {url}: {others}") for url in self.urls}
        log.warning("process group %s of %s: %s", self.name, ", ".join(self.urls), reasons[first])
        self._leave()

    def _leave(self) -> None:
        """Closing our connections ends what the engines still wait for."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            in_thread(group.abort)  # NCCL may take its time over it


def join_all(groups: Sequence[UpdateGroup]) -> None:
    """Meet the engines of all groups, at the same time."""
    for joining in [in_thread(group.join) for group in groups]:
        joining.result()


def _connect(
    store: TCPStore, world_size: int, name: str, backend: Backend, timeout: timedelta
) -> dist.ProcessGroupGloo | dist.ProcessGroupNCCL:
    """Rank 0 of a group whose other members call torch's own functions with `name`: these prefixes are theirs."""
    device = "cpu" if backend == "gloo" else "cuda"
    own = PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    if backend == "gloo":
        return dist.ProcessGroupGloo(own, 0, world_size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    # Its watchdog would end the process; our own deadline comes first.
    options._timeout = 10 * timeout + timedelta(hours=1)
    return dist.ProcessGroupNCCL(own, 0, world_size, options)


def _broadcast(group: Any, tensor: torch.Tensor, timeout: timedelta) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    if tensor.is_cuda:
        torch.cuda.set_device(tensor.device)
    work = group.broadcast([tensor], options)
    work.wait(timeout)
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()


def _in_short(error: BaseException) -> str:
    """What a backend says, without the place in its source before it and its advice behind it."""
    said = " ".join(str(error).split()).partition(" This is typically")[0]
    return re.sub(r"^\[/[^]]*\] ", "", said)[:300]


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Run it in a daemon thread, which may be left behind when it blocks."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return future


def address_towards(urls: Sequence[str]) -> str:
    """This machine's address as the engines see it: that of the route to the first one that is not on it.

    Raises:
        WeightsError: the name of an engine's host is not known here.
    """
    found = []
    for url in urls:
        parts = urlsplit(url)
        try:
            family, kind, _, _, place = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(place)  # a datagram socket sends nothing here
                found.append(str(probe.getsockname()[0]))
        except OSError as error:
            raise WeightsError(f"engine {url}: no route to its host: {error}") from error
    away = [address for address in found if not address.startswith("127.") and address != "::1"]
    return (away or found)[0]
