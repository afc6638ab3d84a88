"""Section `optimizer:`, AdamW and its learning-rate schedule for the RL phase (the warm-up phase has `sft:`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .base import Section, Weight

_Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW as Megatron-Core runs it."""

    lr: float = Field(1e-6, gt=0, le=1)
    """Peak learning rate. 5e-7 to 1e-6 is usual for full training of 7B and larger."""
    min_lr: float = Field(0.0, ge=0, le=1)
    """Where `linear` and `cosine` schedules end."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from lr / lr_warmup_steps."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    """Adam's decay rates."""
    eps: float = Field(1e-8, gt=0, le=1)
    """Adam's denominator offset."""
    weight_decay: Weight = 0.0
    """Decoupled weight decay; never applied to norms and biases."""
    clip_grad: Weight = 1.0
    """Global gradient norm above which gradients are scaled down; 0 = off."""
    max_skipped_steps: int = Field(3, ge=1)
    """Consecutive updates skipped for a non-finite loss or gradient before the run ends with an error."""

    @model_validator(mode="after")
    def _falls(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is above lr={self.lr}, from which schedules fall; lower it")
        return self
