"""The gate lets generation calls, pauses and updates pass each other without losing anyone."""

from __future__ import annotations

import asyncio

import pytest

from megatron_rl.engines.embedded.gate import Gate, ShuttingDown


class Visitor:
    """Passes the gate as a task and notes it."""

    def __init__(self, gate: Gate, update: bool = False) -> None:
        self.inside, self.leave = asyncio.Event(), asyncio.Event()
        self._way = gate.update() if update else gate.generation()
        self.task = asyncio.ensure_future(self._visit())

    async def _visit(self) -> None:
        async with self._way:
            self.inside.set()
            await self.leave.wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_an_update_waits_for_those_inside_and_holds_newcomers() -> None:
    async def scene() -> None:
        gate = Gate()
        old, update, new = Visitor(gate), Visitor(gate, update=True), Visitor(gate)
        await settle()
        assert (old.inside.is_set(), update.inside.is_set(), new.inside.is_set()) == (True, False, False)
        old.leave.set()
        await settle()
        assert (update.inside.is_set(), new.inside.is_set()) == (True, False)
        update.leave.set()
        await settle()
        assert new.inside.is_set()
        new.leave.set()
        await new.task

    asyncio.run(scene())


def test_a_pause_lets_updates_pass_those_inside_one_by_one() -> None:
    async def scene() -> None:
        gate = Gate()
        held = Visitor(gate)
        await settle()
        gate.pause()
        first, second, late = Visitor(gate, update=True), Visitor(gate, update=True), Visitor(gate)
        await settle()
        assert (first.inside.is_set(), second.inside.is_set(), late.inside.is_set()) == (True, False, False)
        first.leave.set()
        await settle()
        assert second.inside.is_set()
        second.leave.set()
        await settle()
        assert not late.inside.is_set()
        gate.resume()
        await settle()
        assert late.inside.is_set()
        for visitor in (held, late):
            visitor.leave.set()
            await visitor.task

    asyncio.run(scene())


def test_a_call_that_gives_up_leaves_no_trace() -> None:
    async def scene() -> None:
        gate = Gate()
        inside = Visitor(gate)
        waiting_update = Visitor(gate, update=True)
        await settle()
        waiting_update.task.cancel()
        inside.task.cancel()
        await settle()
        late = Visitor(gate)
        await settle()
        assert late.inside.is_set()
        late.leave.set()
        await late.task
        await asyncio.wait_for(gate.until_empty(), 5)

    asyncio.run(scene())


def test_closing_turns_away_those_who_wait() -> None:
    async def scene() -> None:
        gate = Gate()
        gate.pause()
        held = Visitor(gate)
        await settle()
        gate.close()
        with pytest.raises(ShuttingDown):
            await held.task

    asyncio.run(scene())
