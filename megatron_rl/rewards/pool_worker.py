"""One worker process as its pool sees it: started, asked, killed. Which job goes where is `pool.py`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Mapping
from typing import Any

import orjson

from megatron_rl.tags import WORKER, tagged

from . import frames

START_TIMEOUT_S = 120.0
"""Importing the code of a user on a busy machine; the deadline of what is asked begins after that."""
CLOSE_TIMEOUT_S = 2.0
KILL_ROUNDS = 20
# What a Python process needs to start and to find its modules. Everything else, secrets first of all, stays out of a
# process that reads text which a model wrote.
_PASSED_ON = (
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LANGUAGE",
    "TZ",
    "TMPDIR",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "SYSTEMROOT",
    "MEGATRON_RL_TASK",  # by which a cluster finds what a verifier has started and left behind
)


class WorkerDied(Exception):
    """The process ended instead of answering; the text says how."""


class PoolWorker:
    """A running process with its verifiers loaded; make one with `PoolWorker.start`."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process, self._name = process, name

    @classmethod
    async def start(cls, module: str, first: Any, failure: type[Exception], what: str) -> tuple[PoolWorker, Any]:
        """Start a process that runs `module`, see `worker.run`; returns it, and its answer to the first frame.

        Raises `failure` with the process's own `error`, or with `what` has happened and how.
        """
        name = secrets.token_hex(8)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**worker_environment(os.environ), WORKER: name},
            # A session of its own: Ctrl-C reaches the controller, which then closes its workers in order; and a kill
            # reaches what the code of a user has started.
            start_new_session=True,
        )
        worker = cls(process, name)
        try:
            worker.send(first)
            answer = await worker.receive(START_TIMEOUT_S)
            if "error" in answer:
                raise failure(answer["error"])
        except (TimeoutError, WorkerDied) as error:
            await worker.kill()
            how = str(error) or f"not ready after {START_TIMEOUT_S:.0f} s"
            raise failure(f"{what}: {how}; see its output") from None
        except BaseException:
            await worker.kill()
            raise
        return worker, answer

    def send(self, value: Any) -> None:
        """Queue one frame; does not wait for the process to read it."""
        assert self._process.stdin is not None
        self._process.stdin.write(frames.encode(value))

    async def receive(self, timeout_s: float) -> Any:
        """The next frame. Raises `TimeoutError` after the deadline and `WorkerDied`."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                header = await self._process.stdout.readexactly(frames.LENGTH.size)
                return orjson.loads(await self._process.stdout.readexactly(frames.LENGTH.unpack(header)[0]))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise WorkerDied(await self._how_it_ended()) from None

    async def kill(self) -> None:
        """End the process and whatever it has started, now, in a session of its own or not."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for _ in range(KILL_ROUNDS):  # they may be forking
            left = tagged(self._name, WORKER)
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                break
        # Not without a deadline: a grandchild that forgot its environment may keep the pipe open.
        await self._wait()
        self._close_pipes()

    async def close(self) -> None:
        """End an idle process in order: its input ends, so it exits; killed if it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._wait()
        await self.kill()

    async def _wait(self) -> int | None:
        """Exit status, or None if the process still runs after CLOSE_TIMEOUT_S."""
        # asyncio.timeout: wait_for, before Python 3.12, can swallow a cancellation.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                return await self._process.wait()
        return None

    def _close_pipes(self) -> None:
        transport = getattr(self._process, "_transport", None)  # asyncio has no public way to close the output pipe
        if transport is not None:
            transport.close()

    async def _how_it_ended(self) -> str:
        code = await self._wait()
        if code is None:
            return "it closed its output"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables a worker gets: a few named ones, and the module path of this process."""
    kept = {name: value for name, value in environment.items() if name in _PASSED_ON or name.startswith("LC_")}
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
