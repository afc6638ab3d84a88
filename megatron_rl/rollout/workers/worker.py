"""The process that makes requests to engines: frames come in on a socket, frames go out. The other end: `pool.py`.

Started as `python -m megatron_rl.rollout.workers.worker PARENT_PID SOCKET`. The first frame says how to reach the
engines and is answered when all is ready. It ends with its parent, or when the socket does.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import traceback
from functools import partial

from megatron_rl.rewards.worker import die_with_parent

from ..exchange import HttpExchange
from ..garbage import look_less_often
from ..protocol import EngineError
from ..routed import RouteFormat
from . import frames


def main() -> int:
    """Serve until the socket ends."""
    die_with_parent(int(sys.argv[1]))
    # Slurm sends signals to every process of a step; the controller ends its workers itself.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    look_less_often()
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[2]))))
    return 0


async def serve(parent: socket.socket) -> None:
    """Answer every request of the other end, in the order in which the engines answer."""
    reader, writer = await asyncio.open_connection(sock=parent)
    first = await frames.read(reader)
    if first is None:
        return
    settings = first[1]["exchange"]
    routes = None if settings["routes"] is None else RouteFormat(**settings["routes"])
    async with HttpExchange(settings["vocab_size"], settings["api_key"], routes) as exchange:
        writer.write(frames.frame({}, {"ready": True}))
        tasks: dict[int, asyncio.Task[None]] = {}
        while (received := await frames.read(reader)) is not None:
            if "ping" in received[1]:
                writer.write(frames.PING)
                continue
            number = received[1]["number"]
            if "cancel" in received[1]:
                if number in tasks:
                    tasks[number].cancel()
                continue
            task = asyncio.create_task(_answer(exchange, writer, *received))
            tasks[number] = task
            task.add_done_callback(partial(_forget, tasks, number))
        for task in tasks.values():
            task.cancel()


async def _answer(
    exchange: HttpExchange, writer: asyncio.StreamWriter, arrays: frames.Arrays, values: frames.Values
) -> None:
    number = values["number"]
    try:
        url, prompts = frames.from_request(arrays, values)
        reply = frames.answer(number, await exchange.generate(url, prompts))
    except EngineError as error:
        reply = frames.failure(number, error)
    except Exception as error:  # a fault of ours: whoever waits for the answer must hear of it
        traceback.print_exc()
        reply = frames.failure(number, EngineError(f"a client worker failed with {error!r}; see its output"))
    writer.write(reply)
    await writer.drain()


def _forget(tasks: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    del tasks[number]


if __name__ == "__main__":
    sys.exit(main())
