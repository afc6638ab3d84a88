"""Section `sft:`, an optional supervised warm-up before the first RL step."""

from __future__ import annotations

from pydantic import Field

from .base import Score, Section


class SftConfig(Section):
    """Supervised steps on `target` texts, stopped by a metric of the evaluation prompts."""

    data: str | None = None
    """JSONL with `prompt` and `target`; null = no warm-up."""
    max_steps: int = Field(100, ge=1)
    """Steps at most."""
    batch_size: int = Field(64, ge=1)
    """Sequences a step."""
    lr: float = Field(1e-5, gt=0, le=1)
    """Learning rate of the warm-up (constant)."""
    stop_metric: str = "format_valid"
    """Evaluation metric that ends the warm-up early."""
    stop_value: Score | None = None
    """Ends the warm-up when the metric reaches this; null = run all max_steps."""
    check_every: int = Field(10, ge=1)
    """Steps between two looks at that metric."""
    check_prompts: int = Field(256, ge=1)
    """Evaluation prompts used for such a look."""
