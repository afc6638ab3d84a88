"""Between HTTP and the weights: calls wait at the gate, tensors arrive, the scheduler's thread puts them in place.

Lives in the event loop. Waits for: the gate (pause, generation), the scheduler's answers, and tensors that a trainer
announced; what blocks does so in threads of its own, so that health and load are told meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar, get_args

from .gate import Gate, MemoryReleased
from .groups import Groups
from .scheduler import Scheduler
from .updates import Updates
from .weight_protocol import (
    InitGroupRequest,
    MemoryRequest,
    Tag,
    UpdateFromDiskRequest,
    UpdateFromDistributedRequest,
    UpdateFromTensorRequest,
)
from .weights import WeightsError
from .wire_tensors import NamedTensors, entries_of, unpickle_tensors

T = TypeVar("T")
DISTRIBUTED, TENSOR = "update_weights_from_distributed", "update_weights_from_tensor"


class WeightService:
    """The weights of one served model. `attach` it before use. Methods raise WeightsError for what is refused.

    Args:
        gate: where generation calls pass.
        groups: those that weights come through.
        abort_all: ends every request.
        model_path: where the weights came from; reported by /model_info.
    """

    def __init__(self, gate: Gate, groups: Groups, abort_all: Callable[[], None], model_path: str) -> None:
        self.model_path = model_path
        self._gate, self._groups, self._abort_all = gate, groups, abort_all

    def attach(self, scheduler: Scheduler, updates: Updates) -> None:
        """Connect the thread that decodes and what it may do to the weights."""
        self._scheduler, self._updates = scheduler, updates

    # ------------------------------------------------------------------------------------------------------ updates
    async def from_disk(self, body: UpdateFromDiskRequest) -> str:
        """Load all weights; outside a pause, after the calls inside have been answered. Returns a message.

        Raises:
            WeightsError: refused, nothing changed.
            ShuttingDown: the server ends.
        """
        if body.abort_all_requests:
            self._abort_all()
        async with self._gate.update():
            self._require_memory()
            await self._call(
                lambda: self._updates.load_from_disk(body.model_path, body.weight_version, body.flush_cache)
            )
            self.model_path = body.model_path
        return _named("Succeeded to update model weights.", body.weight_version)

    async def begin(self) -> None:
        """Open a session."""
        async with self._gate.update():
            await self._call(self._updates.begin)

    async def end(self) -> None:
        """Close the session."""
        async with self._gate.update():
            await self._call(self._updates.end)

    async def from_distributed(self, body: UpdateFromDistributedRequest) -> str:
        """Receive what the trainer broadcasts and put it in place. Returns a message."""

        def receive() -> NamedTensors:
            entries = entries_of(body.names, body.dtypes, body.shapes)
            return self._groups.receive(body.group_name, entries, body.load_format is not None)

        return _named("Succeeded to update parameter online.", await self._from_memory(DISTRIBUTED, body, receive))

    async def from_tensor(self, body: UpdateFromTensorRequest) -> str:
        """Put tensors that are in the body in place. Returns a message."""
        payloads = body.serialized_named_tensors
        if len(payloads) != 1:
            raise WeightsError(f"serialized_named_tensors holds {len(payloads)} payloads; one for each rank, here 1")
        flattened = body.load_format is not None
        version = await self._from_memory(TENSOR, body, lambda: unpickle_tensors(payloads[0], flattened))
        return _named("Success", version)

    async def _from_memory(
        self,
        function: str,
        body: UpdateFromDistributedRequest | UpdateFromTensorRequest,
        receive: Callable[[], NamedTensors],
    ) -> str | None:
        if body.abort_all_requests:
            self._abort_all()
        async with self._gate.update():
            self._require_memory()
            await self._call(lambda: self._updates.require_session(function))
            tensors = await self._in_thread(receive)
            await self._call(lambda: self._updates.load(tensors, body.weight_version, body.flush_cache))
        return body.weight_version

    async def rename(self, version: str, abort_all: bool) -> None:
        """Give the weights in force another name, at once, paused or not."""
        if abort_all:
            self._abort_all()
        await self._call(lambda: self._scheduler.name_weights(version))

    async def checksums(self) -> dict[str, str]:
        """Parameter name -> SHA-256."""
        self._require_memory()
        return await self._call(self._updates.checksums)

    # ------------------------------------------------------------------------------------------------------- groups
    async def join(self, body: InitGroupRequest) -> str:
        """Meet the trainer and the other receivers in a process group. Returns a message."""
        if body.backend != "gloo":
            raise WeightsError(f"backend {body.backend!r}: the embedded engine runs on a CPU and knows only 'gloo'")
        await self._in_thread(
            lambda: self._groups.join(
                body.master_address, body.master_port, body.rank_offset, body.world_size, body.group_name
            )
        )
        return "Succeeded to initialize custom process group."

    async def leave(self, group: str) -> str:
        """Leave a process group. Returns a message."""
        await self._in_thread(lambda: self._groups.leave(group))
        return "Succeeded to destroy custom process group."

    # ------------------------------------------------------------------------------------------------------- memory
    async def release(self, body: MemoryRequest) -> None:
        """Give memory away, while nothing runs; keys and values are forgotten, weights are only out of bounds."""
        tags, before = _tags(body), self._gate.released
        if self._gate.occupied and not self._gate.paused:
            raise WeightsError("release_memory_occupation should be called only when server is idle.")
        self._gate.released = before | tags  # before the first wait: nobody enters in between
        try:
            await self._call(lambda: self._updates.release("kv_cache" in tags))
        except BaseException:
            self._gate.released = before
            raise

    def resume(self, body: MemoryRequest) -> None:
        """Take memory back."""
        tags = _tags(body)
        if missing := sorted(tags - self._gate.released):
            raise WeightsError(f"the memory of {', '.join(missing)} is not released")
        self._gate.released -= tags

    def _require_memory(self) -> None:
        try:
            self._gate.require_memory("weights")
        except MemoryReleased as error:
            raise WeightsError(str(error)) from None

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """The result of a function that may block for minutes. The server can end meanwhile: it is a daemon thread."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="weights", daemon=True).start()
        return await self._gate.unless_closed(asyncio.wrap_future(future))

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._scheduler.call(function))


def _named(message: str, version: str | None) -> str:
    return message if version is None else f"{message} Weight version updated to {version}."


def _tags(body: MemoryRequest) -> frozenset[str]:
    return frozenset(body.tags or get_args(Tag))
