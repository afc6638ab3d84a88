"""The verifier `environment`: what the environment of a conversation gave for its turns, see docs/environments.md."""

from __future__ import annotations

from megatron_rl.data.records import PromptRecord

ENVIRONMENT_REWARD = "environment_reward"
"""Key of `record.extra` under which verifiers of a run with an environment find the sum of its rewards."""


def environment(response: str, record: PromptRecord) -> float:
    """Sum of the rewards of all turns. Raises `ValueError` when there was no environment."""
    if ENVIRONMENT_REWARD not in record.extra:
        raise ValueError("the reward component environment needs an environment; set rollout.environment")
    return float(record.extra[ENVIRONMENT_REWARD])
