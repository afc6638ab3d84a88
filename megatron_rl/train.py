"""The training loop; read this first. One process per trainer rank runs it, all in step.

    warm_up      supervised steps until held-out answers have the right format          (optional, `sft:`)
    rl_step      wait for rollouts -> pull this rank's share -> log-probs -> updates -> weights to the engines
    finish       last checkpoint, result, report

What each line waits for: `wait` for the controller to have `rollout.groups_per_step` groups (polling, never inside a
collective); `pull` for the data-parallel leader's HTTP answer; `train_step` for the other trainer ranks;
`wait_for_engines` for what must be generated with the old weights (`rollout.mode`); `publish` for every engine to hold
the new ones. The controller goes on with step k + 1 as soon as `start` has named its weights.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from megatron_rl.algorithms.spec import LossSpec
from megatron_rl.bring_up import in_words, open_session
from megatron_rl.cluster.processes import EXIT_RESUMABLE
from megatron_rl.session import STOP_SIGNALS, Session, StopRequested

log = logging.getLogger(__name__)


def train(s: Session) -> int:
    """Warm up, then take `steps` RL steps, evaluating and saving on the way. Returns the exit code."""
    step = s.restore()
    try:
        if step is None:
            warm_up(s)
            step = 0
        s.publish(step)
        s.catch_up(step)
        s.save_warm_up(step)
        while step < s.cfg.steps:
            s.stop_if_requested()
            s.rollouts.start(step)
            rl_step(s, step)
            step += 1
        if s.lacks_evaluation(step):  # the signal came during it
            raise StopRequested
    except StopRequested:
        if step is not None:  # else the warm-up begins again
            s.save(step)
        return EXIT_RESUMABLE
    s.finish(step)
    return 0


def warm_up(s: Session) -> None:
    """Supervised steps on target texts; ends early when the watched metric has reached its value."""
    sft = s.cfg.sft
    for i, batch in enumerate(s.sft_batches(), start=1):
        with s.sft_step(i) as metrics:
            metrics.merge(s.policy.sft_step(*batch, sft.lr))
            reached = (i % sft.check_every == 0) and s.sft_target_reached(i, metrics)
        if reached:
            break
        s.stop_if_requested()
    s.policy.reset_optimizer()
    s.policy.freeze_reference()


def rl_step(s: Session, step: int) -> None:
    """One batch of rollouts becomes new weights on every engine."""
    spec = LossSpec.from_config(s.cfg.algorithm)
    with s.step(step) as (timer, metrics):
        with timer.phase("generate"):
            s.wait_for_rollouts(step)
        with timer.phase("pull"):
            table, updates = s.rollouts.pull(step)
        with timer.phase("log_probs"):
            updates = [s.add_log_probs(update) for update in updates]
        s.stop_if_requested()  # the weights are still those of `step`: the batch is kept, the step is taken again
        with timer.phase("train"):
            updates = s.add_targets(table, updates)
            s.policy.set_learning_rate(s.learning_rate(step))
            results = [s.policy.train_step(update.batch, update.plan, spec) for update in updates]
        with timer.phase("generate"):
            s.rollouts.wait_for_engines(step + 1)
        with timer.phase("weights"):
            s.publish(step + 1)
        s.rollouts.done(step, s.gaps(table, updates))
        s.record(metrics, table, updates, results)
        s.evaluate_if_due(step + 1, timer, metrics)
    s.save_if_due(step + 1)


def main(argv: list[str] | None = None) -> None:
    """`python -m megatron_rl.train CONFIG.yaml [--from CHECKPOINT]`, one process per rank (see `cluster.local`)."""
    parser = argparse.ArgumentParser(description="One trainer rank of a run; `megatron-rl train` starts them all.")
    parser.add_argument("config", type=Path)
    parser.add_argument("--from", dest="checkpoint", type=Path)
    words = parser.parse_args(argv)
    for number in STOP_SIGNALS:
        signal.signal(number, _leave)
    try:
        with open_session(words.config, words.checkpoint) as session:
            code = train(session)
    except Exception as error:
        message = in_words(error)
        if message is None:
            raise
        log.error("%s", message)
        code = 1
    _exit(code)


def _exit(code: int) -> NoReturn:
    """Everything is closed and on disk; taking Python and torch apart takes seconds that a cluster may not give."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave(*_: object) -> NoReturn:
    """TERM or USR2 until the session takes over: there is nothing to save yet."""
    sys.exit(EXIT_RESUMABLE)


if __name__ == "__main__":
    main()
