"""What one trainer rank holds during a run, and the verbs of the loop in `train.py`: publish, evaluate, save, record.

Only rank 0 talks to controller and engines, writes metrics and shows progress; `RankZero` shares what it learns.

A signal to end (TERM or USR2) is taken at the next of these, on all ranks together: between steps; before the update;
while rollouts, an evaluation or the engines are awaited, at once. Where a cluster sends TERM to all processes of a run,
engines obey it first, and what rank 0 then sees of them is no failure: it waits a moment for its own signal.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil

from megatron_rl.algorithms.schedules import learning_rate
from megatron_rl.cluster.rank_zero import RankZero
from megatron_rl.cluster.run_dir import RunDir
from megatron_rl.colocation import Devices
from megatron_rl.config import Config, read_hf_config
from megatron_rl.feed import RolloutFeed, sft_batches
from megatron_rl.monitor.metrics import PhaseTimer, StepMetrics
from megatron_rl.monitor.recorder import Recorder
from megatron_rl.monitor.result import RunResult
from megatron_rl.policy.batch import SequenceBatch
from megatron_rl.policy.exchange import sum_over_data_parallel
from megatron_rl.policy.microbatch import Plan
from megatron_rl.policy.policy import LogProbs, Policy
from megatron_rl.policy.sequence_gaps import sequence_gaps
from megatron_rl.policy.step_batch import LocalUpdate
from megatron_rl.policy.step_targets import fill_targets
from megatron_rl.publisher import Publisher
from megatron_rl.rollout.control import EngineControl
from megatron_rl.rollout.pull import ControllerClient
from megatron_rl.rollout.wire import RolloutTable
from megatron_rl.step_metrics import batch_metrics, mean_of_updates

log = logging.getLogger(__name__)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
"""Slurm: TERM before a preemption and at `scancel --signal=TERM`, USR2 as the batch script passes it on."""
SPREAD_S = 5.0
"""How much later than engines and controller rank 0 may get a signal that was sent to all."""


class StopRequested(Exception):
    """The run was asked to end (TERM or USR2): save and leave; raised on all ranks at the same place."""


@dataclass
class Progressed:
    """What a checkpoint remembers of the run besides model, optimizer and controller."""

    step: int = 0
    train_seconds: float = 0.0
    before: dict[str, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    evaluated: int = -1
    """The step of `latest`."""
    source_means: dict[str, float] = field(default_factory=dict)
    """Running mean reward by source of the prompt, for `algorithm.ema_baseline`."""


class Session:
    """One rank of one run: attributes are its parts, methods are verbs that every rank calls in the same order."""

    def __init__(
        self,
        cfg: Config,
        policy: Policy,
        controller: ControllerClient,
        engines: EngineControl,
        zero: RankZero,
        recorder: Recorder | None,
        resume_from: Path | None,
        devices: Devices,
    ) -> None:
        self.cfg, self.policy, self._devices = cfg, policy, devices
        self.run, self.hf, self.state = RunDir(cfg.run_dir), read_hf_config(cfg.model.path), Progressed()
        say = recorder.progress.note if recorder else lambda line: None
        self.rollouts = RolloutFeed(cfg, controller, zero, say, self._is_terminated, self._stop_arrives)
        self._publisher = Publisher(cfg, policy, zero, engines, self._is_terminated, self._stop_arrives)
        self._zero, self._recorder = zero, recorder
        self._shown, self._tokens, self._saved = "", 0, -1
        engines.interrupted = self._is_terminated
        self._resume_from = resume_from
        self._began = time.monotonic()
        self._terminated = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_term)

    # ------------------------------------------------------------------------------------------------ beginning

    def restore(self) -> int | None:
        """Load the checkpoint that the run is resumed from; returns its step, or None for a run from the start."""
        if self._resume_from is None:
            return None
        extra = self.policy.load(self._resume_from)
        self.state = Progressed(**extra["progress"])
        self._began = time.monotonic() - self.state.train_seconds
        self.rollouts.put_state(extra["controller"])
        self._saved = self.state.step
        log.info("resumed from %s", self._resume_from)
        return self.state.step

    def sft_batches(self) -> Iterator[tuple[SequenceBatch, Plan]]:
        """Batches of the warm-up; none when `sft.data` is not set."""
        if self.cfg.sft.data is None:
            return
        self._stage("warm-up", self.cfg.sft.max_steps)
        yield from sft_batches(self.cfg)

    @contextmanager
    def sft_step(self, number: int) -> Iterator[StepMetrics]:
        """Collects the metrics of one warm-up step and writes them."""
        metrics = StepMetrics()
        metrics.put("sft/step", number)
        self._devices.to_trainer()
        yield metrics
        if self._recorder:
            self._recorder.sft_step(number, metrics.as_dict())

    def sft_target_reached(self, number: int, metrics: StepMetrics) -> bool:
        """Look at `sft.stop_metric` on held-out prompts with the weights as they are now."""
        sft = self.cfg.sft
        if sft.stop_value is None:
            return False
        self.publish(0)
        found = self._evaluation("sft", number, sft.check_prompts, 1) or {}
        value = found.get(f"eval/{sft.stop_metric}")
        if value is None:  # no sample could be judged, or the run is to end
            return False
        metrics.put(f"sft/{sft.stop_metric}", value)
        return value >= sft.stop_value

    # ------------------------------------------------------------------------------------------------ one step

    @contextmanager
    def step(self, step: int) -> Iterator[tuple[PhaseTimer, StepMetrics]]:
        """Times and collects one RL step, and writes it as number step + 1."""
        self._stage("RL", self.cfg.steps, step)
        metrics = StepMetrics()
        timer = PhaseTimer(self._recorder.progress.phase if self._recorder else None)
        yield timer, metrics
        self.state.step = step + 1
        if self._recorder:
            times = timer.metrics()
            metrics.merge(times)
            metrics.put("system/tokens_per_second", self._tokens / times["time/step"])
            metrics.put("system/rss_gib", psutil.Process().memory_info().rss / 2**30)
            metrics.put("system/probes_skipped", self._publisher.probes_skipped)
            self._recorder.step(step + 1, metrics.as_dict())

    def learning_rate(self, step: int) -> float:
        """The rate of all updates of RL step `step`."""
        o = self.cfg.optimizer
        return learning_rate(
            step,
            lr=o.lr,
            schedule=o.lr_schedule,
            min_lr=o.min_lr,
            warmup_steps=o.lr_warmup_steps,
            total_steps=self.cfg.steps,
        )

    def add_log_probs(self, update: LocalUpdate) -> LocalUpdate:
        """Fill in the log-probs that are compared with: old ones, and the reference's when there is a KL term."""
        mode, batch = self.cfg.algorithm.old_logprobs, update.batch
        if mode == "rollout":
            update = update.with_arrays(old_log_probs=batch.behaviour_log_probs)
        elif mode == "recompute":
            update = _with_old(update, self.policy.log_probs(batch, update.plan))
        if self.cfg.algorithm.kl_coef:
            update = update.with_arrays(reference_log_probs=self.policy.reference_log_probs(batch, update.plan))
        return update

    def add_targets(self, table: RolloutTable, updates: Sequence[LocalUpdate]) -> list[LocalUpdate]:
        """Fill in the advantage and the weight of every token; the log-probs must be there."""
        filled, self.state.source_means = fill_targets(
            vars(table), updates, self.cfg, sum_over_data_parallel, self.state.source_means
        )
        return filled

    def gaps(self, table: RolloutTable, updates: Sequence[LocalUpdate]) -> dict[str, list[float | None]] | None:
        """How far trainer and engine are apart on each sample; None where old log-probs were not recomputed."""
        if self.cfg.algorithm.old_logprobs != "recompute":
            return None
        return sequence_gaps(updates, len(table), sum_over_data_parallel)

    def publish(self, version: int) -> None:
        """Give the weights to the engines, and tell the controller which of them hold them; see `Publisher`.

        When the run is to end, engines that do not answer are none of its concern any more.
        """
        self._devices.to_engines()
        self._serve(version, self._publisher.publish(version, self._devices.weights_are_loaded))

    def _serve(self, version: int, urls: Collection[str], repaired: bool = False) -> None:
        """Tell the controller that these engines hold the weights, and no others, or with `repaired` these as well."""
        if urls:  # else the run is to end, or nothing was repaired
            self.rollouts.announce(version, sorted(urls), self._publisher.checksum, repaired)

    def record(
        self,
        metrics: StepMetrics,
        table: RolloutTable,
        updates: Sequence[LocalUpdate],
        results: Sequence[Mapping[str, float]],
    ) -> None:
        """Metrics of the batch and of its updates."""
        self._tokens = int((table.prompt_length + table.response_length).sum())
        metrics.merge(batch_metrics(table))
        found = [{**update.metrics, **result} for update, result in zip(updates, results, strict=True)]
        metrics.merge(mean_of_updates(found))

    # ------------------------------------------------------------------------------------------------ now and then

    def lacks_evaluation(self, step: int) -> bool:
        """The weights of `step` are to be evaluated (`eval.every`, the first and the last ones) and were not yet."""
        return self.state.evaluated != step and (step == 0 or self._is_due(step, self.cfg.eval.every))

    def catch_up(self, step: int) -> None:
        """The evaluation of the first weights, or one that was cut off by the signal that ended an earlier start."""
        if self.lacks_evaluation(step):
            found = self._measure(step)
            if step == 0:
                self.state.before = found
            if self._recorder and found:
                self._recorder.values(step, found)

    def evaluate_if_due(self, step: int, timer: PhaseTimer, metrics: StepMetrics) -> None:
        """Every `eval.every` steps and after the last one."""
        if self.lacks_evaluation(step):
            with timer.phase("eval"):
                found = self._measure(step)
            metrics.merge(found)

    def save_if_due(self, step: int) -> None:
        """Every `checkpoint.every` steps and after the last one."""
        if self._is_due(step, self.cfg.checkpoint.every):
            self.save(step)

    def save_warm_up(self, step: int) -> None:
        """What the warm-up has learned, so that a run that dies early need not learn it again."""
        if step == 0 and self.cfg.sft.data is not None:
            self.save(0)

    def save(self, step: int) -> None:
        """One atomic unit: model, optimizer, RNG, this state and the controller's; once per step."""
        if step == self._saved:
            return
        self._saved = step
        self.state.train_seconds = time.monotonic() - self._began
        extra = {"progress": asdict(self.state), "controller": self.rollouts.get_state()}
        # Only what was measured of these very weights may call them the best.
        metric = self.state.latest.get(self.cfg.checkpoint.metric) if self.state.evaluated == step else None
        began = time.monotonic()
        with self._devices.training_state():
            self.policy.save(self.run.path, step, extra, metric)
        if self._recorder:
            self._recorder.values(step, {"time/checkpoint": time.monotonic() - began})

    def stop_if_requested(self) -> None:
        """Raise StopRequested on every rank once rank 0 has got the signal."""
        if self._zero.run("whether to stop", self._is_terminated, self.cfg.cluster.controller_timeout_s + 30):
            raise StopRequested

    def wait_for_rollouts(self, step: int) -> None:
        """Until the batch of `step` is complete. Raises StopRequested when a signal to end comes first.

        Engines that came back without the weights are given them meanwhile. Devices that are shared are then the
        trainer's, as soon as the engines have nothing to do.
        """
        while (needy := self.rollouts.wait(step)) is None or needy:
            if needy is None:
                raise StopRequested
            log.info("weights %d once more, for %s", step, ", ".join(needy))
            self._serve(step, self._publisher.repair(needy), repaired=True)
        if self._devices.are_shared:
            self.rollouts.wait_for_engines(step + 1)
        self._devices.to_trainer()

    def finish(self, step: int) -> None:
        """Write the result and the report; the run is complete (or was asked to stop and has saved itself)."""
        if self._recorder:
            result = RunResult.from_evaluations(
                self.state.before,
                self.state.latest,
                train_seconds=time.monotonic() - self._began,
                steps=step,
                seed=self.cfg.seed,
                run_dir=self.cfg.run_dir,
            )
            self._recorder.finish(result)

    # ------------------------------------------------------------------------------------------------ parts

    def _is_due(self, step: int, every: int) -> bool:
        """After the last step, and after each multiple of `every` unless that is 0."""
        return step == self.cfg.steps or (every > 0 and step % every == 0)

    def _measure(self, step: int) -> dict[str, float]:
        """Evaluate the published weights as section `eval` says, and remember what was found."""
        found = self._evaluation("eval", step, self.cfg.eval.prompts, self.cfg.eval.samples_per_prompt)
        if found is None:
            return {}
        self.state.latest, self.state.evaluated = found, step
        return found

    def _evaluation(self, label: str, step: int, prompts: int, samples: int) -> dict[str, float] | None:
        """Metrics, none without held-out prompts; None when it was cut off since the run is to end."""
        if self.cfg.data.eval_prompts is None:
            return {}
        return self.rollouts.evaluate(label, step, prompts, samples)

    def _stage(self, name: str, total: int, done: int = 0) -> None:
        if self._recorder and self._shown != name:
            self._recorder.progress.stage(name, total, done)
            self._shown = name

    def _on_term(self, *_: object) -> None:
        self._terminated = True

    def _is_terminated(self) -> bool:
        return self._terminated

    def _stop_arrives(self) -> bool:
        """Whether the signal is here, or comes within a moment; on rank 0."""
        deadline = time.monotonic() + SPREAD_S
        while not self._terminated and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._terminated


def _with_old(update: LocalUpdate, found: LogProbs) -> LocalUpdate:
    """What the policy was before the update: log-probs, and with experts their choice."""
    filled = update.with_arrays(
        old_log_probs=found.log_probs, old_routes=found.old_routes, routing_mismatch=found.routing_mismatch
    )
    return replace(filled, metrics=found.metrics)
