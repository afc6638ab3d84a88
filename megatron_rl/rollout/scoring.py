"""From generated tokens to rewards: verifiers are called, totals shaped, samples taken out of the loss. No scheduling.

Evaluation uses `judge` alone: shaping and filters are for training.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_rl.algorithms.shaping import overlong_penalty
from megatron_rl.config import Config
from megatron_rl.data import PromptRecord, PromptTokenizer
from megatron_rl.rewards import RewardPool
from megatron_rl.rewards.from_environment import ENVIRONMENT_REWARD

from .sample import ENVIRONMENT_FAILED, Group, Sample


async def judge(group: Group, record: PromptRecord, tokenizer: PromptTokenizer, verifiers: RewardPool) -> None:
    """Decode every response and set what the verifiers say of it. Raises what the verifiers raise.

    A sample whose environment failed keeps NaN: what stands in it is no whole answer.
    """
    for sample in group.samples:
        sample.text = tokenizer.decode(sample.response_tokens.tolist())
    judged = [sample for sample in group.samples if sample.finish_reason != ENVIRONMENT_FAILED]
    results = await verifiers.score([(_seen_by_verifiers(record, sample), sample.text) for sample in judged])
    for sample, result in zip(judged, results, strict=True):
        sample.score(result.total, result.correctness, result.components)


def _seen_by_verifiers(record: PromptRecord, sample: Sample) -> PromptRecord:
    """With what an environment gave, for the component `environment`."""
    if sample.environment_reward is None:
        return record
    return replace(record, extra={**record.extra, ENVIRONMENT_REWARD: sample.environment_reward})


def shape(group: Group, cfg: Config) -> None:
    """Overlong punishment on the totals, `reward.shuffle`, then the masks of samples that must not be trained on.

    Masked: truncated ones with `overlong_filter`, those without a finite reward, and all of an uninformative group with
    `dynamic_sampling: mask`.
    """
    rollout = cfg.rollout
    if rollout.overlong_cache is not None:
        for sample in group.samples:
            sample.reward += overlong_penalty(
                sample.response_length, rollout.max_response_tokens, rollout.overlong_cache, rollout.overlong_scale
            )
    if cfg.reward.shuffle:
        shuffle_rewards(group, cfg.seed)
    masks_group = rollout.dynamic_sampling == "mask" and not group.informative
    for sample in group.samples:
        if masks_group or not sample.valid or (sample.truncated and rollout.overlong_filter):
            sample.exclude()


def shuffle_rewards(group: Group, seed: int) -> None:
    """Permute (reward, correctness) over the samples of a group: what is learnt from them is then noise.

    The permutation depends on seed and group id only. Sorted random bits, which numpy keeps the same in every version.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, group.id])).random_raw(len(group.samples))
    earned = [(s.reward, s.correctness) for s in group.samples]
    for sample, source in zip(group.samples, np.argsort(bits, kind="stable"), strict=True):
        sample.reward, sample.correctness = earned[source]
