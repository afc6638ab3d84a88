"""Operators that are worth a hand-written kernel; what a loss does with their results lives in `algorithms`.

Each operator is public under one name here and picks its implementation by device (`backend`).
"""

from .linear import LinearLossOutput, linear_logprob, linear_policy_loss
from .logprob import vocab_parallel_logprob
from .loss import policy_loss
from .token_loss import PolicyLossOutput

__all__ = [
    "LinearLossOutput",
    "PolicyLossOutput",
    "linear_logprob",
    "linear_policy_loss",
    "policy_loss",
    "vocab_parallel_logprob",
]
