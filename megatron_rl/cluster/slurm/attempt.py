"""One attempt at the run inside the allocation: three steps, started, watched and ended together.

    engines     one task a node, each supervises its replicas     --output attempt-N/engines-NODE-TASK.log
    controller  one task beside trainer rank 0                    --output attempt-N/controller-NODE-0.log
    trainer     one task a rank                                   --output attempt-N/trainer-NODE-RANK.log

Waits for: the end of any step; a signal to this process; `cluster.progress_timeout_s` without a new row in
metrics.jsonl. What follows from how an attempt ended is decided in `supervisor.py`.
"""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from megatron_rl.cluster.processes import QUIET, Signalled
from megatron_rl.cluster.run_dir import Anchor, RunDir
from megatron_rl.config import Config

from .allocation import Allocation
from .placement import Placement
from .steps import Layout, Step, end, python, srun

log = logging.getLogger(__name__)
POLL_S = 0.2
DUMP_TIMEOUT_S = 90.0
PASS_ON_AGAIN_S = 30.0
"""A signal that srun got while it was still starting tasks may have reached none."""
OBEYED = (0, 75, 143)
"""Exit codes of engines and controller that a signal to the whole job explains; the trainer got it too and saves."""


class Verdict(Enum):
    """How an attempt ended."""

    COMPLETE = "complete"
    RESUMABLE = "stopped by a signal"
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """The end of one attempt.

    Attributes:
        reason: what happened, for people.
        nodes: where it happened, as far as it is known.
        first_row_s: seconds to the first new row of metrics.jsonl; None when there was none.
    """

    verdict: Verdict
    reason: str
    nodes: tuple[str, ...] = ()
    first_row_s: float | None = None


class Attempt:
    """See the module. `name` is unique among all attempts of all runs; `folder` takes the logs.

    `signalled`: of the batch script.
    """

    def __init__(
        self,
        cfg: Config,
        placement: Placement,
        allocation: Allocation,
        folder: Path,
        name: str,
        signalled: Signalled,
        anchor: Anchor,
    ) -> None:
        self._cfg, self._placement, self._allocation = cfg, placement, allocation
        self._folder, self._name, self._signalled, self._anchor = folder, name, signalled, anchor
        self._run = RunDir(cfg.run_dir)
        self._steps: dict[str, Step] = {}
        self._progress = Progress(self._run.metrics)
        self._pass_on_at = 0.0
        self._left_alone_since: float | None = None

    def run(self, checkpoint: Path | None) -> Outcome:
        """Start all steps, wait for the end, end what is left. Raises RunDirError when the directory was moved."""
        outcome: Outcome | None = None
        try:
            self._start(checkpoint)
            outcome = self._watch()
        finally:
            # What engines and controller of an unfinished run still hold, the next attempt makes anew.
            complete = outcome is not None and outcome.verdict is Verdict.COMPLETE
            end([*self._steps.values()], self._allocation, self._cfg.cluster.stop_timeout_s, gently=complete)
        return Outcome(outcome.verdict, outcome.reason, outcome.nodes, self._progress.first_s)

    # ------------------------------------------------------------------------------------------------------ starting

    def _start(self, checkpoint: Path | None) -> None:
        p, config = self._placement, str(self._run.config)
        verb = python("-m", "megatron_rl.cli")
        whole = p.shape.cpus
        if p.engines:
            command = [*verb, "serve", "--config", config, "--per-node", str(p.engines_per_node)]
            layout = Layout(p.engines, len(p.engines), 1, whole, p.shape.gpus)
            self._step("engines", layout, [*command, "--host", "0.0.0.0", "--logs", str(self._folder)])
        layout = Layout(p.trainer[:1], 1, 1, p.controller_cpus, 0)
        self._step("controller", layout, [*verb, "rollout", "--config", config, "--host", "0.0.0.0", "--outlive-term"])
        layout = Layout(p.trainer, p.world_size, p.ranks_per_node, p.cpus_per_rank, p.shape.gpus)
        train = python(*QUIET, "-m", "megatron_rl.train")
        self._step("trainer", layout, [*train, config, *(["--from", str(checkpoint)] if checkpoint else [])])

    def _step(self, name: str, layout: Layout, command: list[str]) -> None:
        cluster = self._cfg.cluster
        on_stop = "pass" if name == "trainer" else "end"
        keeper = python("-m", "megatron_rl.cluster.keeper", "--run", self._name, "--role", name, "--on-stop", on_stop)
        keeper += ["--patience", str(cluster.stop_timeout_s), "--"]
        # The trainer's ranks leave together after a save; 0 would mean forever.
        wait_s = cluster.save_timeout_s if name == "trainer" else cluster.stop_timeout_s
        self._steps[name] = srun(name, layout, [*keeper, *command], self._folder, wait_s, cluster.srun_args)

    # ------------------------------------------------------------------------------------------------------ watching

    def _watch(self) -> Outcome:
        while True:
            self._anchor.require()
            self._pass_signal_on()
            outcome = self._trainer_ended() or self._others_ended() or self._overdue() or self._hung()
            if outcome:
                return outcome
            time.sleep(POLL_S)

    def _pass_signal_on(self) -> None:
        now = time.monotonic()
        if self._signalled.at is None or now < self._pass_on_at:
            return
        log.info("a signal to the job: the trainer is asked to save")
        self._steps["trainer"].signal(signal.SIGUSR2)
        self._pass_on_at = now + PASS_ON_AGAIN_S

    def _trainer_ended(self) -> Outcome | None:
        trainer = self._steps["trainer"]
        code = trainer.code
        bad = trainer.first_end
        if code == 0 and bad is None:
            return Outcome(Verdict.COMPLETE, "the run is complete")
        if bad is not None and bad.may_be_resumed:
            # The others follow when they have saved; --wait bounds that.
            return None if code is None else Outcome(Verdict.RESUMABLE, "the trainer obeyed a signal")
        if bad is not None or code is not None:
            time.sleep(1.0)  # it may have fallen because of another step, whose end is then the reason to tell
            own = Outcome(Verdict.FAILED, trainer.describe_end(), trainer.bad_nodes)
            return self._others_ended() or own
        return None

    def _others_ended(self) -> Outcome | None:
        """Engines or controller are gone: a failure, unless a signal explains it; then the trainer may save first."""
        others = [step for name, step in self._steps.items() if name != "trainer"]
        gone = next((step for step in others if step.code is not None or _lost_node(step)), None)
        if gone is None:
            return None
        if _lost_node(gone) or gone.code not in OBEYED:
            return Outcome(Verdict.FAILED, gone.describe_end(), gone.bad_nodes)
        now = time.monotonic()
        if self._left_alone_since is None:
            log.info("%s ended by a signal; waiting for the trainer to save", gone.name)
            self._left_alone_since = now
        if now - self._left_alone_since < self._cfg.cluster.save_timeout_s:
            return None
        return Outcome(Verdict.FAILED, f"{gone.name} ended, and the trainer did not within cluster.save_timeout_s")

    def _overdue(self) -> Outcome | None:
        limit = self._cfg.cluster.save_timeout_s
        if self._signalled.at is None or self._signalled.age_s < limit:
            return None
        self._dump_stacks()
        return Outcome(
            Verdict.RESUMABLE,
            f"the trainer has not saved within {limit:.0f} s of the signal (cluster.save_timeout_s); the run goes on "
            "from its last checkpoint",
        )

    def _hung(self) -> Outcome | None:
        idle, cluster = self._progress.idle_s(), self._cfg.cluster
        limit, keys = cluster.progress_timeout_s, "cluster.progress_timeout_s"
        if self._progress.first_s is None:  # importing, loading, compiling
            limit, keys = limit + cluster.start_timeout_s, f"cluster.start_timeout_s + {keys}"
        if idle < limit:
            return None
        self._dump_stacks()
        return Outcome(
            Verdict.FAILED,
            f"no progress for {limit:.0f} s ({keys}); where every process stands: {self._folder}/stacks-*.txt",
        )

    def _dump_stacks(self) -> None:
        nodes = list(dict.fromkeys([*self._placement.trainer, *self._placement.engines]))
        command = python("-m", "megatron_rl.cluster.stacks", self._name, str(self._folder))
        step = srun("stacks", Layout(nodes, len(nodes), 1, 1, 0), command, self._folder, 30, [])
        deadline = time.monotonic() + DUMP_TIMEOUT_S
        while step.code is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        end([step], self._allocation, 5.0, gently=False)


def _lost_node(step: Step) -> bool:
    return step.first_end is not None and step.first_end.code is None


class Progress:
    """Whether the run moves: a change of metrics.jsonl, which gets a row for every step, warm-up and evaluation."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        self._began = self._changed_at = time.monotonic()
        self._seen = self._size()
        self.first_s: float | None = None

    def idle_s(self) -> float:
        """Seconds since the last change, or since the beginning."""
        size, now = self._size(), time.monotonic()
        if size != self._seen:
            if size > self._seen and self.first_s is None:
                self.first_s = now - self._began
                log.info("first progress of this attempt after %.0f s", self.first_s)
            self._seen, self._changed_at = size, now
        return now - self._changed_at

    def _size(self) -> int:
        """0 while there is no such file; it shrinks when a restart cuts off what came after its checkpoint."""
        try:
            return self._metrics.stat().st_size
        except FileNotFoundError:
            return 0
