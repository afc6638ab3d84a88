"""The workers as the controller sees them: an `Exchange` that hands each request to the least loaded one.

    generate -> frame to a worker -> its answer, matched by number
                   |  the process ended: RequestLost for all that it had, and a new process
                   |  it answers no ping: it is ended, and then the same

What a lost worker was asked for is asked for again by the client, from the last whole segment of each sample.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ..exchange import HttpExchange
from ..protocol import EngineError, Generation, Prompt, RequestLost
from ..routed import RouteFormat
from . import frames

log = logging.getLogger(__name__)
START_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 2.0
RESTART_PAUSE_S = 0.1
SILENT_S = 30.0
"""A worker that says nothing for so long after a ping is stopped or hangs, and is ended. Else it takes moments."""
SILENT_ROUNDS = 10
"""Parts in which that is waited for: a pause of this process counts as one, and what came meanwhile is read first."""
MAX_STARTS = 5
"""Starts in a row that may fail before requests do."""


class WorkerExchange:
    """`count` processes, which do what `HttpExchange` does. Use as an async context manager.

    Raises EngineError on entering when a worker cannot be started.
    """

    def __init__(
        self, count: int, vocab_size: int, api_key: str | None = None, routes: RouteFormat | None = None
    ) -> None:
        kept = None if routes is None else asdict(routes)
        settings = {"vocab_size": vocab_size, "api_key": api_key, "routes": kept}
        self._workers = [Worker(i, settings) for i in range(count)]
        self._aborts = HttpExchange(vocab_size, api_key)
        self._keepers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> WorkerExchange:
        await self._aborts.__aenter__()
        # All are waited for: a start that is left alone could not be ended.
        starts = [asyncio.ensure_future(worker.start()) for worker in self._workers]
        try:
            outcomes = await asyncio.gather(*starts, return_exceptions=True)
            for failure in filter(None, outcomes):
                raise failure
        except BaseException:
            await asyncio.gather(*starts, return_exceptions=True)  # they may just be cancelled
            await self.__aexit__()
            raise
        self._keepers = [asyncio.create_task(worker.keep()) for worker in self._workers]
        return self

    async def __aexit__(self, *_: object) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers))
        await self._aborts.__aexit__()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run, for whoever looks at them from outside: tests do, nothing else here."""
        return [worker.pid for worker in self._workers if worker.pid]

    async def generate(self, url: str, prompts: Sequence[Prompt]) -> list[Generation]:
        """See `Exchange`."""
        running = [worker for worker in self._workers if worker.pid]
        if not running:
            broken = [worker.broken for worker in self._workers if worker.broken]
            if len(broken) == len(self._workers):
                raise EngineError(broken[0])
            raise RequestLost("no client worker runs; they are being started again")
        return await min(running, key=lambda worker: worker.load).generate(url, prompts)

    async def abort(self, url: str, rids: Sequence[str]) -> None:
        """See `Exchange`; from this process, past requests that wait in a worker."""
        await self._aborts.abort(url, rids)


class Worker:
    """One process at a time, and the requests that it has."""

    def __init__(self, index: int, settings: dict[str, Any]) -> None:
        self._index, self._settings = index, settings
        self._heard = asyncio.Event()
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[list[Generation]]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self.load = 0
        """Sequences that it was asked for."""
        self.pid = 0
        """0 while none runs."""
        self.broken = ""
        """Why it is not started any more."""

    async def start(self) -> None:
        """Start a process and wait until it is ready. Raises EngineError."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", f"{__package__}.worker", str(os.getpid()), str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,  # Ctrl-C reaches the controller, which ends its workers in order
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(frames.frame({}, {"exchange": self._settings}))
        ready = None
        with suppress(TimeoutError, ValueError):
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = await frames.read(self._reader)
        if ready is None:
            raise EngineError(
                f"a client worker (rollout.client_workers) did not start: {await self._end()}; see its output"
            )
        self.pid = self._process.pid

    async def keep(self) -> None:
        """Hand out its answers; start another process whenever one has ended."""
        failures = 0
        while True:
            if self.pid:
                failures = 0
                name = f"client worker {self._index} (pid {self.pid})"
                silent = False
                try:
                    silent = await self._listen_or_silence()
                except Exception:
                    log.exception("%s sent what cannot be read", name)
                how = f"{name} ended ({await self._end(at_once=silent)})"
                if silent:
                    how = f"{name} was silent for {SILENT_S:g} s, stopped or hanging, and was ended"
                log.warning("%s with %d requests; another one is started", how, len(self._answers))
                self._lose(how)
            try:
                await self.start()
            except (EngineError, OSError) as error:
                failures += 1
                log.warning("%s", error)
                if failures == MAX_STARTS:
                    self.broken = f"{error}; tried {MAX_STARTS} times"
                    return
                await asyncio.sleep(RESTART_PAUSE_S * 2**failures)

    async def generate(self, url: str, prompts: Sequence[Prompt]) -> list[Generation]:
        """See `Exchange`."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self.load += len(prompts)
        writer = self._writer
        writer.write(frames.request(number, url, prompts))
        try:
            return await answer
        except asyncio.CancelledError:
            if not writer.is_closing():
                writer.write(frames.cancel(number))
            raise
        finally:
            self.load -= len(prompts)
            self._answers.pop(number, None)

    async def close(self) -> None:
        """End the process; its requests are lost."""
        if self._process is not None:
            await self._end()
        self._lose("the client workers are being closed")

    async def _listen_or_silence(self) -> bool:
        """Hand out its answers until it has ended; True when it has not, but says nothing any more."""
        listening, silence = asyncio.create_task(self._listen()), asyncio.create_task(self._until_silent())
        try:
            await asyncio.wait({listening, silence}, return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                listening.result()
            return not listening.done()
        finally:
            listening.cancel()
            silence.cancel()
            await asyncio.gather(listening, silence, return_exceptions=True)

    async def _until_silent(self) -> None:
        while True:
            self._heard.clear()
            self._writer.write(frames.PING)
            for _ in range(SILENT_ROUNDS):
                with suppress(TimeoutError):
                    async with asyncio.timeout(SILENT_S / SILENT_ROUNDS):
                        await self._heard.wait()
                        break
            else:
                return
            await asyncio.sleep(SILENT_S / SILENT_ROUNDS)

    async def _listen(self) -> None:
        while (received := await frames.read(self._reader)) is not None:
            self._heard.set()
            answer = self._answers.get(received[1].get("number", -1))
            if answer is None or answer.done():
                continue  # taken back meanwhile, or the answer to a ping
            try:
                answer.set_result(frames.from_answer(*received))
            except EngineError as error:
                answer.set_exception(error)

    def _lose(self, reason: str) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(RequestLost(reason))

    async def _end(self, at_once: bool = False) -> str:
        """Close the socket, which ends the process; killed if it stays, or `at_once`. Says how it ended."""
        assert self._process is not None
        self.pid = 0
        self._writer.close()
        try:
            async with asyncio.timeout(0.0 if at_once else CLOSE_TIMEOUT_S):
                code = await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            code = await self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _environment() -> dict[str, str]:
    """This process's own, with its module path."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
