"""The body of a batch job: attempts until the run is complete, and what happens between them.

    complete             -> 0
    stopped by a signal  -> 75; `scontrol requeue` first, unless the job was cancelled or gained nothing since the last
    failed               -> again from the newest checkpoint, on the nodes that are left, bounded; then 1

TERM and USR2 to this process end the attempt with a save. A node that Slurm calls down or drained is not used again;
one on which an attempt failed becomes the spare when there is another.
"""

from __future__ import annotations

import logging
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.cluster.processes import EXIT_RESUMABLE, Signalled
from megatron_rl.cluster.resume import nothing_to_do, require_same_run
from megatron_rl.cluster.run_dir import Anchor, RunDir
from megatron_rl.config import Config, dump, validate

from .allocation import Allocation, SlurmError
from .attempt import Attempt, Outcome, Verdict
from .placement import Placement, need, place, require_allocation
from .record import JobRecord

log = logging.getLogger(__name__)
REQUEUE_PATIENCE_S = 120.0
"""How long Slurm may take to end a batch script that it has put back into the queue."""


@dataclass(frozen=True)
class Start:
    """From where attempts begin.

    Attributes:
        newest: finds the newest checkpoint, None when there is none yet: every attempt but the job's first.
        first: finds the one that the job's first attempt goes on from; None = the run begins with this job.
        accept_changes: go on although the configuration decides otherwise than before.
    """

    newest: Callable[[], Path | None]
    first: Callable[[], Path | None] | None
    accept_changes: bool = False


def run_in_allocation(cfg: Config, start: Start) -> int:
    """Run the configuration, as it was submitted, to its end inside this job's allocation.

    Returns:
        The exit code: 0, 1, or 75.

    Raises:
        ConfigError: the configuration does not fit the allocation, or not what is left of it.
        RunDirError: the run directory is in use, holds another run, or was moved away.
        SlurmError: Slurm does not answer.
    """
    signalled = Signalled(signal.SIGTERM, signal.SIGUSR2)
    run = RunDir(cfg.run_dir)
    with run.locked(2 * cfg.cluster.stop_timeout_s):
        return Supervisor(cfg, start, run, Allocation.of(), signalled).run()


class Supervisor:
    """Holds what is the same for all attempts; see the module."""

    def __init__(self, cfg: Config, start: Start, run: RunDir, allocation: Allocation, signalled: Signalled) -> None:
        self._cfg, self._start, self._run = cfg, start, run
        self._allocation, self._signalled, self._anchor = allocation, signalled, Anchor(run)
        self._folder = run.logs / f"{cfg.name}-{allocation.job}"
        self._record = JobRecord.load(self._folder / "job.json")
        self._needed = need(cfg, allocation.shape)
        if not self._record.attempts:
            require_allocation(self._needed, allocation.nodes())

    def run(self) -> int:
        """Attempts, one after the other. Returns the exit code."""
        futile = 0
        while True:
            before = self._checkpoint()
            if before and not self._record.attempts and (told := nothing_to_do(self._run, before, self._cfg)):
                log.info("%s", told)
                return 0
            outcome = self._attempt(before)
            if outcome.verdict is Verdict.COMPLETE:
                log.info("result: %s, %s", self._run.path / "result.json", self._run.path / "report.html")
                return 0
            if outcome.verdict is Verdict.RESUMABLE or self._signalled.at:
                return self._leave()
            futile = 0 if self._newest() != self._name(before) else futile + 1
            if futile > self._cfg.cluster.max_restarts:
                log.error(
                    "giving up after %d attempts in a row without a new checkpoint (cluster.max_restarts)", futile
                )
                return 1
            pause = self._cfg.cluster.restart_pause_s * 2 ** max(0, futile - 1)
            log.info("starting again in %.0f s", pause)
            self._sleep(pause)
            if self._signalled.at:
                return self._leave()

    def _attempt(self, checkpoint: Path | None) -> Outcome:
        self._anchor.require()
        usable = self._allocation.usable(self._allocation.nodes())
        placement = place(self._cfg, self._needed, usable, self._allocation.shape, self._record.strikes)
        cfg = self._cfg_of(placement)
        self._prepare(checkpoint, cfg)
        nodes = {"trainer": [*placement.trainer], "engines": [*placement.engines], "spare": [*placement.spares]}
        number = self._record.begin(nodes, self._name(checkpoint))
        folder = self._folder / f"attempt-{number}"
        folder.mkdir()
        begin = f"from {checkpoint.name}" if checkpoint else "from the start"
        log.info("attempt %d %s; logs in %s", number, begin, folder)
        for role, names, what in placement.rows():
            log.info("  %-10s %s  %s", role, names, what)
        log.info("  follow it: tail -f '%s/trainer-%s-0.log'", folder, placement.trainer[0])
        name = f"{self._allocation.job}-{number}-{secrets.token_hex(4)}"
        outcome = Attempt(cfg, placement, self._allocation, folder, name, self._signalled, self._anchor).run(checkpoint)
        self._record.finish(outcome.verdict.value, outcome.reason, outcome.nodes, outcome.first_row_s)
        say = log.error if outcome.verdict is Verdict.FAILED else log.info
        say("attempt %d %s: %s", number, outcome.verdict.value, outcome.reason)
        return outcome

    def _prepare(self, checkpoint: Path | None, cfg: Config) -> None:
        self._run.prepare(self._start.first is not None or bool(self._record.attempts))
        if checkpoint:
            for change in require_same_run(self._run.config, cfg, self._start.accept_changes):
                log.warning("going on with a change: %s", change)
        self._run.write_config(dump(cfg))
        self._folder.mkdir(exist_ok=True)

    def _cfg_of(self, placement: Placement) -> Config:
        """The configuration at the size that the nodes allow."""
        values = self._cfg.model_dump()
        dp, replicas = placement.data_parallel_size, placement.replicas or self._cfg.engine.replicas
        if (dp, replicas) != (self._cfg.parallel.data_parallel_size, self._cfg.engine.replicas):
            log.warning("at a smaller size: parallel.data_parallel_size=%d, engine.replicas=%d", dp, replicas)
        values["parallel"] |= {"data_parallel_size": dp, "world_size": None}
        values["engine"]["replicas"] = replicas
        return validate(values)

    # ------------------------------------------------------------------------------------------------------ between

    def _checkpoint(self) -> Path | None:
        if self._record.attempts:
            return self._start.newest()
        return self._start.first() if self._start.first else None

    def _newest(self) -> str | None:
        return max((path.name for path in self._run.checkpoints.glob("step-*")), default=None)

    def _name(self, checkpoint: Path | None) -> str | None:
        return checkpoint.name if checkpoint else None

    def _leave(self) -> int:
        """Back into the queue if that makes sense. Returns 75 either way."""
        newest, record = self._newest(), self._record
        if not self._allocation.is_running():
            log.info(
                "Slurm is ending the job; if it was cancelled, submit it again with --resume to go on with %s",
                self._run.path,
            )
        elif record.requeues >= self._cfg.cluster.max_requeues:
            log.error("requeued %d times (cluster.max_requeues), that is enough", record.requeues)
        elif record.requeues and newest == record.requeued_at:
            log.error("no new checkpoint since the last requeue (%s): not requeued again", newest)
        else:
            self._requeue(newest)
        return EXIT_RESUMABLE

    def _requeue(self, newest: str | None) -> None:
        record = self._record
        record.requeues, record.requeued_at = record.requeues + 1, newest
        record.save()
        log.info("back into the queue (number %d), to go on from %s", record.requeues, newest or "the start")
        try:
            self._allocation.requeue()
        except SlurmError as error:
            log.error("%s; submit it again with --resume", error)
            return
        time.sleep(REQUEUE_PATIENCE_S)  # Slurm ends this process; to end before would count as the end of the job

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._signalled.at and time.monotonic() < deadline:
            time.sleep(0.1)
