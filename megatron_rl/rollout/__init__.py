"""Rollouts: the record that travels, the client of the engines, the controller, and the trainer's side of it.

Imports neither torch nor Megatron: the controller starts in a fraction of a second. Names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .control import EngineControl
    from .controller import run_controller
    from .protocol import EngineError
    from .pull import ControllerClient, ControllerError
    from .sample import Group, Sample
    from .wire import RolloutShard, RolloutTable

_HOME = {
    "ControllerClient": "pull",
    "ControllerError": "pull",
    "EngineControl": "control",
    "EngineError": "protocol",
    "Group": "sample",
    "RolloutShard": "wire",
    "RolloutTable": "wire",
    "Sample": "sample",
    "run_controller": "controller",
}
__all__ = [
    "ControllerClient",
    "ControllerError",
    "EngineControl",
    "EngineError",
    "Group",
    "RolloutShard",
    "RolloutTable",
    "Sample",
    "run_controller",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
