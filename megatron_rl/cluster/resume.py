"""Whether a configuration goes on with the run that lies in a directory, or would be another run under its name.

What decides what is learned is compared: model, seed, order of prompts, algorithm, optimizer, rewards, sampling and
routing. Layout, engines, deadlines, logging, evaluation, how the loss is computed (`loss:`) and the number of steps may
change from one start to the next. The prompts themselves are compared by the controller, which has their fingerprint in
its saved state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config import Config, load_config

from .run_dir import RunDir, RunDirError

COMPARED: dict[str, frozenset[str]] = {
    "model": frozenset({"make_vocab_size_divisible_by"}),
    "optimizer": frozenset({"max_skipped_steps"}),
    "algorithm": frozenset({"preset", "max_tokens_per_microbatch"}),
    "data": frozenset({"prompts", "eval_prompts"}),
    "rollout": frozenset(
        {
            "concurrency",
            "request_timeout_s",
            "step_timeout_s",
            "retries",
            "max_sample_rounds",
            "client_workers",
            "segment_tokens",
            "environment_workers",
            "environment_timeout_s",
        }
    ),
    "reward": frozenset({"workers", "timeout_s"}),
    "moe": frozenset(),
}
"""Sections that must stay as they were, and their keys that need not."""


@dataclass(frozen=True)
class Resume:
    """How to go on with an earlier run.

    Attributes:
        checkpoint: finds the checkpoint to start from, None when there is none yet; called while the directory is held.
        accept_changes: go on although the configuration decides otherwise than before.
    """

    checkpoint: Callable[[], Path | None]
    accept_changes: bool = False


def require_same_run(recorded: Path, cfg: Config, accept_changes: bool) -> list[str]:
    """The changes since the configuration in the file `recorded`, if they are accepted.

    Raises:
        RunDirError: there are changes; the message lists each key with both values.
    """
    changes = changed_keys(load_config(recorded), cfg) if recorded.exists() else []
    if changes and not accept_changes:
        raise RunDirError(
            f"{recorded} belongs to a run that decides otherwise: {'; '.join(changes)}. Resume with the values of that "
            "run, add --accept-changes to go on with the new ones, or choose another run_dir"
        )
    return changes


def nothing_to_do(run: RunDir, checkpoint: Path, cfg: Config) -> str | None:
    """What to tell whoever resumes a run that has all steps at `checkpoint`, result and report; None for any other."""
    step = int(checkpoint.name.rpartition("-")[2])
    if step < cfg.steps or not _is_finished(run):
        return None
    return (
        f"run_dir={run.path} is complete (step {step}, steps={cfg.steps}): nothing was started. "
        f"See {run.report}, or go on with steps=N, N more than {step}"
    )


def _is_finished(run: RunDir) -> bool:
    """Its report is the last that a run writes, of the result: an older one stems from the way there."""
    try:
        return run.report.stat().st_mtime_ns >= run.result.stat().st_mtime_ns
    except FileNotFoundError:
        return False


def changed_keys(before: Config, after: Config) -> list[str]:
    """`section.key: value before -> value after` for every key that matters.

    >>> from megatron_rl.config import validate
    >>> run = {"run_dir": "r", "model": {"path": "m"}, "data": {"prompts": "p"}}
    >>> run |= {"reward": {"components": [{"name": "x"}]}}
    >>> changed_keys(validate(run), validate(run | {"steps": 7, "seed": 1, "optimizer": {"lr": 0.5}}))
    ['seed: 0 -> 1', 'optimizer.lr: 1e-06 -> 0.5']
    """
    changes = [f"seed: {before.seed} -> {after.seed}"] if before.seed != after.seed else []
    for section, free in COMPARED.items():
        old, new = (getattr(cfg, section).model_dump(mode="json") for cfg in (before, after))
        changes += [
            f"{section}.{key}: {old.get(key)} -> {new.get(key)}"
            for key in old | new
            if key not in free and old.get(key) != new.get(key)
        ]
    return changes
