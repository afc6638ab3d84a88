"""Prompts: what a record is, reading and checking files, the resumable order, tokens; no training, no generation.

Names are loaded on first use, so that a reward worker that needs only `PromptRecord` does not import a tokenizer.
Never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cursor import PromptCursor
    from .dataset import PromptDataset
    from .lengths import check_targets, fit_to_length
    from .records import DataError, PromptRecord
    from .tokenizer import PromptTokenizer
    from .turn_frame import TurnFrame

_HOME = {
    "DataError": "records",
    "PromptRecord": "records",
    "PromptDataset": "dataset",
    "PromptCursor": "cursor",
    "PromptTokenizer": "tokenizer",
    "TurnFrame": "turn_frame",
    "check_targets": "lengths",
    "fit_to_length": "lengths",
}
__all__ = [
    "DataError",
    "PromptCursor",
    "PromptDataset",
    "PromptRecord",
    "PromptTokenizer",
    "TurnFrame",
    "check_targets",
    "fit_to_length",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
