"""What a group and a batch must be before they are trained on, and which tokens are too old to be. Chooses nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_rl.algorithms.staleness import off_policy_tokens, stale_tokens, token_versions
from megatron_rl.config.rollout import RolloutConfig

from .sample import Group


class SamplingError(RuntimeError):
    """A step's batch cannot be made. The message says why and what to do."""


def exhausted(groups: int, rounds: int, rates: str) -> SamplingError:
    """The error when `groups`, all of `rounds` rounds, do not make a batch; `rates`: correctness in words."""
    return SamplingError(
        f"all {groups} groups of rollout.max_sample_rounds={rounds} rounds are used up; mean correctness seen (value: "
        f"groups): {rates}; use prompts of fitting difficulty, a larger rollout.group_size or max_sample_rounds, or "
        "rollout.dynamic_sampling=mask"
    )


def require_started_version(group: Group) -> None:
    """No token may be older than the weights that the group was started with, whenever it was gone on with.

    Raises SamplingError: an engine holds other weights than it should.
    """
    if group.version_first < group.version:
        raise SamplingError(
            f"a token of group {group.id} was sampled by weight version {group.version_first}, but the group was "
            f"started with version {group.version}; did the weight update reach every engine (engine.urls)?"
        )


def require_published_versions(groups: Sequence[Group], step: int) -> None:
    """No token may be newer than the weights of `step`, the newest that exist. Raises SamplingError."""
    newer = [sample for group in groups for sample in group.samples if sample.version_last > step]
    if newer:
        raise SamplingError(
            f"{newer[0].id} was sampled by weight version {newer[0].version_last}, but {step} is the newest that this "
            "run has published; is a server of engine.urls used by another run as well?"
        )


def require_rewards(groups: Sequence[Group]) -> None:
    """A batch without a single reward would be trained on in silence, step after step. Raises SamplingError."""
    samples = [sample for group in groups for sample in group.samples]
    if not any(sample.valid for sample in samples):
        lost = sum(sample.finish_reason == "environment" for sample in samples)
        why = f"the environment failed for {lost}, " if lost else ""
        raise SamplingError(
            f"none of the {len(samples)} samples of the batch has a reward: {why}every call of a verifier failed for "
            "the others; the log of the controller says how; correct rollout.environment, the verifier, its component "
            "in reward.components, or the data"
        )


def mask_old_tokens(groups: Sequence[Group], rollout: RolloutConfig, step: int) -> int:
    """Take tokens out of the loss that are too old for `step`, as `rollout` says. Returns how many.

    Raises SamplingError when no token is left.
    """
    masked = left = 0
    for sample in (sample for group in groups for sample in group.samples):
        versions = token_versions(sample.spans)
        out = np.zeros(len(versions), np.bool_)
        if rollout.stale_policy == "mask_stale_tokens":
            out |= stale_tokens(versions, step, rollout.max_staleness)
        if rollout.mask_off_policy_tokens:
            out |= off_policy_tokens(versions, step)
        masked += int(np.count_nonzero(out & sample.loss_mask))
        sample.loss_mask = sample.loss_mask & ~out
        left += sample.trainable_tokens
    if masked and not left:
        raise SamplingError(
            f"all {masked} tokens of the batch are too old for the loss (rollout.stale_policy="
            f"{rollout.stale_policy}, max_staleness={rollout.max_staleness}, mask_off_policy_tokens="
            f"{str(rollout.mask_off_policy_tokens).lower()}); raise max_staleness, or let algorithm.corrections deal "
            "with them (stale_policy=keep_with_correction, mask_off_policy_tokens=false)"
        )
    return masked
