"""Section `logging:`, what a run writes for people."""

from __future__ import annotations

from typing import Literal

from .base import Section


class LoggingConfig(Section):
    """Console, writers and dumps."""

    console: Literal["auto", "rich", "plain", "quiet"] = "auto"
    """`auto`: a live display on a terminal, one line a step elsewhere."""
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level of our own lines in the log files; of other packages, WARNING."""
    tensorboard: bool = True
    """Write RUN/tensorboard."""
    wandb: bool = False
    """Also log to Weights & Biases (needs the `wandb` extra)."""
    wandb_project: str = "megatron-rl"
    """Project name there."""
    dump_rollouts: bool = True
    """Write every step's samples to RUN/rollouts/*.parquet."""
