"""Operators on logits that are worth a hand-written kernel; what a loss does with their results lives in `algorithms`.

Each operator is public under one name here and picks its implementation by device.
"""

from .logprob import vocab_parallel_logprob

__all__ = ["vocab_parallel_logprob"]
