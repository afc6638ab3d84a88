"""Between HTTP and the weights: calls wait at the gate, tensors arrive, the scheduler's thread puts them in place.

Lives in the event loop. Waits for: the gate (pause, generation), the scheduler's answers, and tensors that a trainer
announced; what blocks does so in threads of its own, so that the load is told meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from megatron_rl.weights.transports.group import in_thread

from .gate import Gate
from .groups import Groups
from .scheduler import Scheduler
from .weight_protocol import (
    InitGroupRequest,
    UpdateFromDiskRequest,
    UpdateFromDistributedRequest,
    UpdateFromTensorRequest,
)
from .weights import Weights, WeightsError
from .wire_tensors import NamedTensors, entries_of, unpickle_tensors

T = TypeVar("T")


class WeightService:
    """The weights of one served model. Methods raise WeightsError, or MemoryReleased, for what is refused.

    Weights from memory need a session, of which there is one at a time; as in SGLang only its client ends it. It keeps
    nobody from generating, and an update that fails half-way keeps what it has replaced: whoever sends weights pauses
    first, and compares checksums at the end.

    Args:
        gate: where generation calls pass.
        groups: those that weights come through.
        scheduler: whose requests and cache the weights concern.
        weights: the parameters.
        model_path: where they came from; reported by /model_info.
    """

    def __init__(self, gate: Gate, groups: Groups, scheduler: Scheduler, weights: Weights, model_path: str) -> None:
        self.model_path = model_path
        self._gate, self._groups, self._scheduler, self._weights = gate, groups, scheduler, weights
        self._in_session = False

    # ------------------------------------------------------------------------------------------------------ updates
    async def from_disk(self, body: UpdateFromDiskRequest) -> str:
        """Load all weights; outside a pause, after the calls inside have been answered. Returns a message.

        Raises:
            WeightsError, MemoryReleased: refused, nothing changed.
            ShuttingDown: the server ends.
        """
        async with self._gate.update():
            self._gate.require_memory("weights")
            await self._call(lambda: self._load_from_disk(body))
            self.model_path = body.model_path
        name = "" if body.weight_version is None else f" Weight version updated to {body.weight_version}."
        return f"Succeeded to update model weights.{name}"

    def _load_from_disk(self, body: UpdateFromDiskRequest) -> None:
        running = self._scheduler.num_running
        if body.flush_cache and running:
            raise WeightsError(
                f"{running} requests are running on keys and values of the old weights, and flush_cache is true; "
                "pause with mode retract first, or send flush_cache false to keep them"
            )
        self._weights.update(body.model_path)
        if body.weight_version is not None:
            self._scheduler.name_weights(body.weight_version)
        if body.flush_cache:
            self._scheduler.flush()

    async def begin(self) -> None:
        """Open a session."""
        async with self._gate.update():
            if self._in_session:
                raise WeightsError("a weight-update session is already open; call end_weight_update() first")
            self._in_session = True

    async def end(self) -> None:
        """Close the session."""
        async with self._gate.update():
            if not self._in_session:
                raise WeightsError("no weight-update session is open; call begin_weight_update() first")
            self._in_session = False

    async def from_distributed(self, body: UpdateFromDistributedRequest) -> None:
        """Receive what the trainer broadcasts and put it in place."""

        def receive() -> NamedTensors:
            return self._groups.receive(body.group_name, entries_of(body.names, body.dtypes, body.shapes))

        await self._from_memory("update_weights_from_distributed", receive)

    async def from_tensor(self, body: UpdateFromTensorRequest) -> None:
        """Put tensors that are in the body in place."""
        payloads = body.serialized_named_tensors
        if len(payloads) != 1:
            raise WeightsError(f"serialized_named_tensors holds {len(payloads)} payloads; one for each rank, here 1")
        flattened = body.load_format is not None
        await self._from_memory("update_weights_from_tensor", lambda: unpickle_tensors(payloads[0], flattened))

    async def _from_memory(self, function: str, receive: Callable[[], NamedTensors]) -> None:
        async with self._gate.update():
            self._gate.require_memory("weights")
            if not self._in_session:
                raise WeightsError(f"{function} must run between begin_weight_update() and end_weight_update()")
            tensors = await self._in_thread(receive)
            await self._call(lambda: self._weights.replace(tensors))

    async def rename(self, version: str) -> None:
        """Give the weights in force another name, at once, paused or not."""
        await self._call(lambda: self._scheduler.name_weights(version))

    async def checksums(self) -> dict[str, str]:
        """Parameter name -> SHA-256."""
        self._gate.require_memory("weights")
        return await self._call(self._weights.checksums)

    # ------------------------------------------------------------------------------------------------------- groups
    async def join(self, body: InitGroupRequest) -> None:
        """Meet the trainer and the other receivers in a process group."""
        if body.backend != "gloo":
            raise WeightsError(f"backend {body.backend!r}: the embedded engine runs on a CPU and knows only 'gloo'")
        await self._in_thread(
            lambda: self._groups.join(
                body.master_address, body.master_port, body.rank_offset, body.world_size, body.group_name
            )
        )

    async def leave(self, group: str) -> None:
        """Leave a process group."""
        await self._in_thread(lambda: self._groups.leave(group))

    # ------------------------------------------------------------------------------------------------------- memory
    async def release(self, tags: frozenset[str]) -> None:
        """Give memory away, while nothing runs; keys and values are forgotten, weights are only out of bounds."""
        before = self._gate.released
        if self._gate.occupied and not self._gate.paused:
            raise WeightsError("release_memory_occupation should be called only when server is idle.")
        self._gate.released = before | tags  # before the first wait: nobody enters in between
        try:
            await self._call(lambda: self._release("kv_cache" in tags))
        except BaseException:
            self._gate.released = before
            raise

    def _release(self, flush: bool) -> None:
        if not self._scheduler.idle:
            raise WeightsError("release_memory_occupation should be called only when server is idle.")
        if flush:
            self._scheduler.flush()

    def resume(self, tags: frozenset[str]) -> None:
        """Take memory back."""
        if missing := sorted(tags - self._gate.released):
            raise WeightsError(f"the memory of {', '.join(missing)} is not released")
        self._gate.released -= tags

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """The result of a function that may block for minutes, or ShuttingDown."""
        return await self._gate.unless_closed(asyncio.wrap_future(in_thread(function)))

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._scheduler.call(function))
