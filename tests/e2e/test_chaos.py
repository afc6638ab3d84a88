"""An asynchronous run to which everything happens: no prompt is lost in the end, and no token has a wrong version.

Two engines generate long, unequal responses in segments, under weight updates by process groups. One is killed at any
moment, another in the middle of an update, then the trainer; the run is resumed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.audit import audit_run

from .live import LiveRun
from .runs import ROOT, environment, make_inputs, train

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
ASYNC = (
    "sft.data=null",  # a random model answers at random length, up to the longest
    "parallel.tensor_model_parallel_size=2",
    "rollout.mode=async",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.max_response_tokens=160",
    "rollout.segment_tokens=24",
    "rollout.dynamic_sampling=off",
    "algorithm.preset=grpo",
    "algorithm.kl_coef=0",
    "algorithm.updates_per_batch=1",
    "optimizer.lr=1e-3",
    "optimizer.lr_warmup_steps=0",
    "engine.replicas=2",
    "engine.weight_transport=broadcast",
    "engine.bucket_mib=1",
    "cluster.max_engine_restarts=20",
    "cluster.stop_timeout_s=5",
    "checkpoint.every=1",
    "checkpoint.keep_last=1000",
    "eval.every=0",
    "eval.prompts=4",
    "reward.workers=1",
    "reward.shuffle=true",  # weights change, and responses stay as long as they are
    "reward.components=[{name: 'tests.unit.rollout_hooks:even_count', correctness: true}]",
)
BEGUN, ENDED = "POST /begin_weight_update", "POST /end_weight_update"
TRIES = 6


def said(folder: Path, replica: int) -> str:
    return (folder / "logs" / f"engine-{replica}.log").read_text()


def updates(folder: Path, replica: int) -> int:
    """Updates that this engine has taken part in to the end."""
    return said(folder, replica).count(ENDED)


def kill_in_mid_update(run: LiveRun, replica: int) -> str:
    """SIGKILL between the begin and the end of a weight update. Returns what the engine said from its begin on."""
    for _ in range(TRIES):
        done = updates(run.folder, replica)
        run.wait_until(f"engine-{replica} to be updated", lambda before=done: updates(run.folder, replica) > before)
        pid, begun = run.pid("engine", replica), said(run.folder, replica).count(BEGUN)
        run.wait_until("an update", lambda before=begun: said(run.folder, replica).count(BEGUN) > before)
        os.kill(pid, signal.SIGKILL)
        rest = said(run.folder, replica).rpartition(BEGUN)[2]
        if ENDED not in rest:
            return rest
    raise AssertionError(f"no update of {TRIES} was hit before its end")


@pytest.mark.parametrize("seed", [5])
def test_killed_engines_a_broken_update_and_a_killed_trainer_cost_no_prompt_and_mix_up_no_version(
    tmp_path: Path, seed: int
) -> None:
    inputs = make_inputs(tmp_path / "inputs", prompts=64, eval_prompts=4, sft_prompts=4)
    folder, dice, began = tmp_path / "run", random.Random(seed), time.monotonic()
    print(f"seed {seed}")
    with LiveRun(folder, inputs, "steps=1000", *ASYNC) as run:
        run.wait_for_step(1)
        time.sleep(dice.uniform(0.0, 1.0))
        print(f"engine-1 killed while {run.doing}")
        run.send(signal.SIGKILL, "engine", 1)
        alone = updates(folder, 1)
        run.wait_until("engine-1 to be updated again", lambda: updates(folder, 1) > alone)
        rest = kill_in_mid_update(run, 0)
        print(f"engine-0 killed in an update, after {rest.split()[:2]}")
        done = updates(folder, 1)
        run.wait_until("three updates without engine-0, or with the new one", lambda: updates(folder, 1) >= done + 3)
        time.sleep(dice.uniform(0.0, 1.0))
        print(f"trainer killed while {run.doing}")
        run.send(signal.SIGKILL, "trainer", 0)
        assert run.end() == 1
    trained = max(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))
    resumed = train(folder, inputs, f"steps={trained + 4}", *ASYNC, "--resume", "--accept-changes")
    assert resumed.code == 0, resumed.output
    print(f"{trained + 4} steps in {time.monotonic() - began:.0f} s")
    assert_whole(folder)
    assert_versions(folder, inputs, tmp_path / "weights", dice)


def assert_whole(folder: Path) -> None:
    """Every prompt drawn is exactly one of trained, filtered, rejected and pending; and the command says so as well."""
    audit = audit_run(folder)
    assert sum(epoch["trained"] for epoch in audit.epochs) == 4 * len(list((folder / "rollouts").iterdir()))
    command = [sys.executable, "-m", "megatron_rl.cli", "ledger", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every prompt is accounted for" in done.stdout


def assert_versions(folder: Path, inputs: Path, weights: Path, dice: random.Random) -> None:
    """Log-probs of trained tokens are those of the weights that they are said to come from, and of no older ones."""
    from .versions import Versions, trained_samples

    samples = trained_samples(folder)
    mixed = [sample for sample in samples if len(sample.spans) > 1]
    chosen = dice.sample(mixed, min(16, len(mixed))) + dice.sample(samples, min(32, len(samples)))
    versions = Versions(folder, inputs / "model", weights)
    errors = [versions.error(sample) for sample in chosen]
    older = [versions.error(s, older=1) for s in chosen if s.version_first > 0]
    spread = sorted({span.version for sample in chosen for span in sample.spans})
    print(f"{len(chosen)} samples, {len(mixed)} of several versions, of {spread}: error {max(errors):.1e}")
    print(f"with the weights before: {min(older):.1e} at least")
    assert max(errors) <= 1e-4
    assert min(older) > 1e-3
    assert mixed
    assert len(spread) >= 3
