"""Section `checkpoint:`, when a run saves itself and what it keeps."""

from __future__ import annotations

from pydantic import Field

from .base import Section


class CheckpointConfig(Section):
    """Checkpoints are whole or absent: each is written aside and renamed into place."""

    every: int = Field(0, ge=0)
    """Steps between two checkpoints; 0 = only after the last step."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints kept."""
    keep_best: bool = True
    """Also keep the checkpoint with the best metric, among those of steps that were evaluated (see `eval.every`)."""
    metric: str = "eval/pass_at_1"
    """The metric that decides which is best (larger is better)."""
