"""One run as local processes: engines, controller and trainer ranks on this machine, started, watched, ended together.

    engines (serve)  <-- HTTP --  controller (rollout)  <-- HTTP --  trainer ranks (train)
         ^______________________ weights ____________________________|

Waits for: any process to end. All trainer ranks ended with 0 = the run is complete; anything else ends the run, and the
message names the process that failed first, what its exit code means, and the end of its log.

TERM may come to the launcher alone or to all processes at once (a service manager, a container): the trainer saves, for
which it needs the controller, who therefore goes on until INT, and no engine, whose end is none of a failure then.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable

from megatron_rl.config import Config, dump

from .bootstrap import child_environment
from .devices import VISIBLE, engine_devices, visible_devices
from .processes import EXIT_RESUMABLE, QUIET, Role, Signalled, kill, start, stop
from .resume import Resume, nothing_to_do, require_same_run
from .run_dir import Anchor, RunDir, RunMoved
from .started import LAUNCH

log = logging.getLogger(__name__)


class RunFailed(RuntimeError):
    """A process of the run failed; the message names it and shows the end of its log."""


def run_local(cfg: Config, resume: Resume | None, say: Callable[[str], None]) -> int:
    """Run to the end. Returns the exit code of the run: 0, or 75 when TERM came and it can be resumed.

    Args:
        say: told what is about to be started, or why nothing is.

    Raises:
        RunDirError: the run directory is in use or holds another run; RunMoved when it was moved away.
        RunFailed: a process failed.
    """
    asked = Signalled(signal.SIGTERM, signal.SIGINT)
    run = RunDir(cfg.run_dir)
    with run.locked(2 * cfg.cluster.stop_timeout_s) as lock:
        checkpoint = resume.checkpoint() if resume else None
        if resume and checkpoint:
            for change in require_same_run(run.config, cfg, resume.accept_changes):
                log.warning("going on with a change: %s", change)
            if told := nothing_to_do(run, checkpoint, cfg):
                say(told)
                return 0
        run.prepare(resume is not None)
        run.write_config(dump(cfg))
        words = ["megatron_rl.train", str(run.config), *(["--from", str(checkpoint)] if checkpoint else [])]
        begin = f"going on from {checkpoint.name}" if checkpoint else "starting"
        say(f"{begin}; the first numbers come when all processes are up; logs in {run.logs}")
        return _run(cfg, run, words, asked, lock)


def run_ranks(cfg: Config, module: str, *words: str) -> None:
    """The run's own engines and its trainer ranks, which do `python -m MODULE CONFIG WORDS` instead of training.

    `cfg.run_dir` is a directory for this alone.

    Raises:
        RunDirError, RunFailed: as `run_local`; RunFailed as well when it was asked to end.
    """
    asked, run = Signalled(signal.SIGTERM, signal.SIGINT), RunDir(cfg.run_dir)
    with run.locked(2 * cfg.cluster.stop_timeout_s) as lock:
        run.prepare(resume=True)
        run.write_config(dump(cfg))
        if _run(cfg, run, [module, str(run.config), *words], asked, lock, controller=False):
            raise RunFailed(f"{module} was asked to end before it was done")


def _run(cfg: Config, run: RunDir, words: list[str], asked: Signalled, lock: int, *, controller: bool = True) -> int:
    """Start all processes, watch them to the end, end what is left. `words`: of the ranks, after `python -m`."""
    roles: list[Role] = []
    try:
        _start_engines(cfg, run, roles, lock)
        if controller:
            argv = [sys.executable, "-m", "megatron_rl.cli", "rollout", "--config", str(run.config), "--outlive-term"]
            log_file = run.log("controller", 0)
            roles.append(start("controller", 0, argv, _environment(), log_file, lock=lock, stop_signal=signal.SIGINT))
        _start_ranks(cfg, run, words, roles, lock)
        return _watch(roles, asked, cfg.cluster.stop_timeout_s, Anchor(run))
    except RunMoved:
        kill(roles)  # TERM would have them save, to a path where the run no longer is
        raise
    finally:
        stop(roles, cfg.cluster.stop_timeout_s)


def _start_engines(cfg: Config, run: RunDir, roles: list[Role], lock: int) -> None:
    """Appends as it starts, so that a failure half-way still ends what runs."""
    env = _environment()
    python = [sys.executable, "-m"]
    if not cfg.engine.urls:
        for replica, devices in enumerate(engine_devices(cfg, visible_devices(env))):
            argv = [*python, "megatron_rl.cli", "serve", "--config", str(run.config), "--replica", str(replica)]
            own = {**env, VISIBLE: ",".join(devices)} if devices else env
            roles.append(start("engine", replica, argv, own, run.log("engine", replica), lock=lock))


def _start_ranks(cfg: Config, run: RunDir, words: list[str], roles: list[Role], lock: int) -> None:
    env = _environment()
    launch = {LAUNCH: uuid.uuid4().hex}
    world = cfg.parallel.world_size or 1
    for rank in range(world):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), **launch}
        # KILL: TERM asks a rank to save, but with the launcher gone, engines and controller are going as well.
        role = start(
            "trainer",
            rank,
            [sys.executable, *QUIET, "-m", *words],
            {**env, **ranks},
            run.log("trainer", rank),
            console=rank == 0,
            lock=lock,
            orphan_signal=signal.SIGKILL,
        )
        roles.append(role)


def _environment() -> dict[str, str]:
    """The caller's environment, as if nothing had launched it; one thread per process: the ranks fill the cores.

    CUDA numbers devices as the driver does, so that `devices.py` means the same ones.
    """
    environ = child_environment(os.environ)
    ours = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {**ours, **environ, "PYTHONUNBUFFERED": "1"}


def _watch(roles: list[Role], asked: Signalled, stop_timeout_s: float, anchor: Anchor) -> int:
    """Wait until the trainer has ended. TERM and INT to this process go on to the trainer ranks, which save."""
    trainers = [r for r in roles if r.name == "trainer"]
    passed_on, left_at = False, None
    while True:
        anchor.require()
        if asked.at and not passed_on:
            log.warning("asked to end: saving the run first, which may take %.0f s at most", 10 * stop_timeout_s)
            for role in trainers:
                if role.process.poll() is None:
                    role.process.send_signal(signal.SIGTERM)
            passed_on = True
        codes = [_exit_code(r, passed_on) for r in trainers]
        if all(c in (0, EXIT_RESUMABLE) for c in codes):
            return max(c or 0 for c in codes)
        ended = [r for r in roles if r.process.poll() is not None]
        failed = [r for r in ended if r.name != "trainer" or _exit_code(r, passed_on) not in (0, EXIT_RESUMABLE)]
        if passed_on:
            failed = [r for r in failed if r.name != "engine"]
        if failed:
            time.sleep(1.0)  # others may fall because of the first; or all were told to end, and we hear of it last
            if asked.at and not passed_on:
                continue
            raise RunFailed(_first_failure(failed, roles))
        if EXIT_RESUMABLE in codes:
            # Saving is over when one rank has left; ranks that were still starting may wait for it in vain.
            left_at = left_at or time.monotonic()
            if time.monotonic() - left_at > stop_timeout_s:
                return EXIT_RESUMABLE
        if asked.age_s > 10 * stop_timeout_s:
            raise RunFailed(f"the trainer did not save and end within {10 * stop_timeout_s:.0f} s of the signal")
        time.sleep(0.1)


def _exit_code(trainer: Role, asked_to_stop: bool) -> int | None:
    """A rank that TERM ended before it could handle signals had nothing to save yet."""
    code = trainer.process.poll()
    return EXIT_RESUMABLE if asked_to_stop and code == -signal.SIGTERM else code


def _first_failure(ended: list[Role], roles: list[Role]) -> str:
    """Of those that have fallen by now, the one that says most.

    A signal from outside or a fault of memory comes first: no process meets it because another one fell.
    """
    ended = [r for r in roles if r.process.poll() not in (None, 0, EXIT_RESUMABLE)] or ended
    order = {"engine": 0, "controller": 1, "trainer": 2}
    return min(ended, key=lambda r: (not _was_struck(r), order[r.name], r.rank)).describe_exit()


def _was_struck(role: Role) -> bool:
    """Whether a signal ended it that no process sends itself: ABRT is how libraries give up, as when a peer is gone."""
    code = role.process.poll() or 0
    number = -code if code < 0 else code - 128
    return number in {s.value for s in signal.Signals} - {signal.SIGABRT, signal.SIGTERM, signal.SIGINT}
