"""Verifiers of responses, how their scores add up, and the processes they run in; never torch, no training, no HTTP.

Names are loaded on first use: a worker process imports the verifiers it runs and nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .pool import RewardPool as RewardPool
    from .registry import RewardError as RewardError

_HOME = {"RewardError": "registry", "RewardPool": "pool"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
