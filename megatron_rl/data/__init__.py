"""Prompts: what a record is, reading and checking files, the resumable order, tokens; no training, no generation.

Names are loaded on first use, so that a reward worker that needs only `PromptRecord` does not import a tokenizer.
Never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cursor import PromptCursor as PromptCursor
    from .dataset import PromptDataset as PromptDataset
    from .lengths import check_targets as check_targets
    from .lengths import fit_to_length as fit_to_length
    from .records import DataError as DataError
    from .records import PromptRecord as PromptRecord
    from .tokenizer import PromptTokenizer as PromptTokenizer
    from .turn_frame import TurnFrame as TurnFrame

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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
