"""Section `rollout:`, how samples are drawn from the engines and which of them are trained on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from .base import Seconds, Section


class RolloutConfig(Section):
    """Sampling, group formation, dynamic sampling, and the controller's deadlines."""

    groups_per_step: int = Field(32, ge=1)
    """Prompts whose groups make one training batch."""
    group_size: int = Field(16, ge=1, le=1000)
    """Samples drawn per prompt (G)."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest prompt, chat template included."""
    max_response_tokens: int = Field(8192, ge=1)
    """Longest response; with max_prompt_tokens it must fit the model's context."""
    temperature: float = Field(1.0, ge=1e-3, le=1e3)
    """Sampling temperature, used for all log-probs as well."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Must be 1 for training: the trainer's log-probs are those of the full distribution."""
    top_k: int = -1
    """Must be -1 (off) for training."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Must be 0 (off) for training."""
    dynamic_sampling: Literal["off", "refill", "mask"] = "off"
    """Groups whose answers are all right or all wrong: kept, replaced by fresh ones, or masked out of the loss."""
    oversample: float = Field(1.0, ge=1)
    """Groups alive at once, as a multiple of groups_per_step."""
    max_sample_rounds: int = Field(10, ge=1)
    """Rounds of refilling before the run stops and shows the pass rates."""
    overlong_cache: int | None = Field(None, ge=1)
    """DAPO's soft punishment starts this many tokens before max_response_tokens; null = off."""
    overlong_scale: float = Field(1.0, gt=0)
    """Size of the soft punishment."""
    overlong_filter: bool = False
    """Take truncated responses out of the loss (they stay in the group's statistics)."""
    concurrency: int = Field(512, ge=1)
    """Sequences in flight at once, over all engines."""
    request_timeout_s: Seconds = 600.0
    """Deadline of one generation request."""
    step_timeout_s: Seconds = 3600.0
    """Deadline of one step's rollouts."""
    retries: int = Field(3, ge=0)
    """Further attempts after a transport error. An engine's answer is never retried."""

    @field_validator("dynamic_sampling", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        """YAML 1.1 reads a bare `off` as false."""
        return "off" if value is False else value

    @model_validator(mode="after")
    def _trainable(self) -> RolloutConfig:
        for key, neutral in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
            if getattr(self, key) != neutral:
                raise ValueError(
                    f"{key}={getattr(self, key)}: tokens sampled from a filtered distribution have other log-probs "
                    f"than the trainer computes; set {key}={neutral}"
                )
        if self.overlong_cache is not None and self.overlong_cache > self.max_response_tokens:
            raise ValueError(
                f"overlong_cache={self.overlong_cache} is longer than max_response_tokens={self.max_response_tokens}; "
                "use 1 .. max_response_tokens, or null to switch it off"
            )
        return self
