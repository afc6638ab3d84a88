"""Who gets which replica, and who must wait for room."""

from __future__ import annotations

import asyncio

from megatron_rl.rollout.router import Gate, Router


def test_a_request_larger_than_the_limit_goes_alone_and_one_that_left_leaves_no_hole():
    async def run() -> list[str]:
        gate, seen = Gate(4), []

        async def use(name: str, size: int) -> None:
            with gate.ticket(size) as ticket:
                await ticket.turn
                seen.append(name)

        with gate.ticket(100):
            waiting = [asyncio.create_task(use(name, size)) for name, size in (("cancelled", 3), ("a", 4), ("b", 1))]
            await asyncio.sleep(0.01)
            waiting[0].cancel()  # and the block ends before that task has noticed
        await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
        with gate.ticket(4) as ticket:
            await asyncio.wait_for(ticket.turn, 5)
            seen.append("whole room")
        return seen

    assert asyncio.run(run()) == ["a", "b", "whole room"]


def test_room_is_given_back_sequence_by_sequence():
    async def run() -> tuple[bool, bool]:
        gate = Gate(4)
        with gate.ticket(6) as first, gate.ticket(2) as second:
            await first.turn
            first.keep(3)
            early = second.turn.done()
            first.keep(2)
            return early, second.turn.done()

    assert asyncio.run(run()) == (False, True)


def test_the_router_is_sticky_takes_the_least_loaded_and_leaves_out_what_does_not_serve():
    router = Router(["a", "b"])
    assert [router.take(key, count) for key, count in (("g1", 5), ("g2", 1), ("g3", 1))] == ["a", "b", "b"]
    assert router.take("g2", 9) == "b"
    router.serve(["b"])
    assert (router.take("g1", 1), router.take("g4", 1)) == ("b", "b")
    router.serve(["a", "b"])
    assert (router.take("g1", 1), router.take("g5", 1)) == ("b", "a")
    router.left("b", 13)
    assert router.take("g6", 1) == "b"
    router.serve([])
    assert router.take("g1", 1) is None


def test_sequences_that_others_have_at_a_replica_count_as_its_load():
    router = Router(["a", "b"])
    assert router.take("g1", 5) == "a"
    router.report("a", 5)  # ours alone
    router.report("b", 3)
    assert router.take("g2", 1) == "b"
    router.left("b", 1)
    router.left("a", 5)
    assert router.take("g3", 1) == "a"
