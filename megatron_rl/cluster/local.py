"""One run as local processes: engines, controller and trainer ranks on this machine, started, watched, ended together.

    engines (serve)  <-- HTTP --  controller (rollout)  <-- HTTP --  trainer ranks (train)
         ^______________________ weights ____________________________|

Waits for: any process to end. All trainer ranks ended with 0 = the run is complete; anything else ends the run, and the
message names the process that failed first, what its exit code means, and the end of its log.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from types import FrameType

from megatron_rl.config import Config, dump
from megatron_rl.files import write_atomic

from .processes import EXIT_RESUMABLE, Role, start, stop
from .run_dir import RunDir


class RunFailed(RuntimeError):
    """A process of the run failed; the message names it and shows the end of its log."""


def run_local(cfg: Config, resume: bool) -> int:
    """Run to the end. Returns the exit code of the run: 0, or 75 when it saved itself after TERM.

    Raises:
        RunDirError: the run directory is in use, or holds another run.
        RunFailed: a process failed.
    """
    run = RunDir(cfg.run_dir)
    with run.locked():
        run.prepare(resume)
        write_atomic(run.config, dump(cfg))
        roles: list[Role] = []
        try:
            _start_all(cfg, run, resume, roles)
            return _watch(roles, cfg.cluster.stop_timeout_s)
        finally:
            stop(roles, cfg.cluster.stop_timeout_s)


def _start_all(cfg: Config, run: RunDir, resume: bool, roles: list[Role]) -> None:
    """Appends as it starts, so that a failure half-way still ends what runs."""
    env = _environment()
    python = [sys.executable, "-m"]
    if not cfg.engine.urls:
        for replica in range(cfg.engine.replicas):
            argv = [*python, "megatron_rl.cli", "serve", "--config", str(run.config), "--replica", str(replica)]
            roles.append(start("engine", replica, argv, env, run.log("engine", replica)))
    argv = [*python, "megatron_rl.cli", "rollout", "--config", str(run.config)]
    roles.append(start("controller", 0, argv, env, run.log("controller", 0)))
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    world = cfg.parallel.world_size or 1
    for rank in range(world):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), **rendezvous}
        # Megatron warns at length about what a machine without CUDA lacks; an error must not drown in it.
        quiet = [sys.executable, "-W", "ignore::UserWarning", "-W", "ignore::FutureWarning", "-m"]
        argv = [*quiet, "megatron_rl.train", str(run.config), *(["--resume"] if resume else [])]
        roles.append(start("trainer", rank, argv, {**env, **ranks}, run.log("trainer", rank), console=rank == 0))


def _environment() -> dict[str, str]:
    """The caller's environment; one thread per process, since the ranks already fill the cores."""
    return {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ, "PYTHONUNBUFFERED": "1"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _watch(roles: list[Role], stop_timeout_s: float) -> int:
    """Wait until the trainer has ended. TERM and INT to this process go on to the trainer ranks, which save."""
    trainers = [r for r in roles if r.name == "trainer"]
    signalled: list[float] = []

    def forward(number: int, _: FrameType | None) -> None:
        signalled.append(time.monotonic())
        for role in trainers:
            if role.process.poll() is None:
                role.process.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    while True:
        codes = [r.process.poll() for r in trainers]
        if all(c in (0, EXIT_RESUMABLE) for c in codes):
            return max(c or 0 for c in codes)
        ended = [r for r in roles if r.process.poll() is not None and (r.name != "trainer" or r.process.returncode)]
        ended = [r for r in ended if r.process.returncode != EXIT_RESUMABLE]
        if ended:
            raise RunFailed(_first_failure(ended, roles))
        if signalled and time.monotonic() - signalled[0] > 10 * stop_timeout_s:
            raise RunFailed(f"the trainer did not save and end within {10 * stop_timeout_s:.0f} s of the signal")
        time.sleep(0.1)


def _first_failure(ended: list[Role], roles: list[Role]) -> str:
    """Others may fall because of the first: give them a moment, then show the one that says most."""
    time.sleep(1.0)
    ended = [r for r in roles if r.process.poll() not in (None, 0, EXIT_RESUMABLE)] or ended
    order = {"engine": 0, "controller": 1, "trainer": 2}
    return min(ended, key=lambda r: (order[r.name], r.rank)).describe_exit()
