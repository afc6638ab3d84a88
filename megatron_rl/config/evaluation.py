"""Section `eval:`, held-out evaluation during the run."""

from __future__ import annotations

from pydantic import Field, model_validator

from .base import Section


class EvalConfig(Section):
    """Sampled pass@k on held-out prompts, before the first step, every so many steps, and at the end."""

    every: int = Field(0, ge=0)
    """Steps between two evaluations; 0 = only before the first step and after the last."""
    prompts: int = Field(256, ge=1)
    """Held-out prompts used (the first so many)."""
    samples_per_prompt: int = Field(1, ge=1, le=1000)
    """Samples per prompt, n of pass@k."""
    ks: list[int] = Field(default_factory=lambda: [1])
    """The k of pass@k; each at most samples_per_prompt."""
    temperature: float = Field(1.0, ge=0, le=1e3)
    """Sampling temperature, at least 1e-3; 0 = greedy."""

    @model_validator(mode="after")
    def _ks(self) -> EvalConfig:
        wrong = [k for k in self.ks if not 1 <= k <= self.samples_per_prompt]
        if wrong:
            raise ValueError(f"ks={self.ks}: {wrong} must lie in 1 .. samples_per_prompt={self.samples_per_prompt}")
        return self

    @model_validator(mode="after")
    def _temperature(self) -> EvalConfig:
        if 0 < self.temperature < 1e-3:
            raise ValueError(f"temperature={self.temperature}: logits divided by it overflow; use 0, or at least 0.001")
        return self
