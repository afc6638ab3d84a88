"""Section `algorithm:`, what the policy update computes. Presets fill what the user leaves out."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from .base import Section

PRESETS: dict[str, dict[str, Any]] = {
    "dapo": {"advantage": "grpo", "eps_low": 0.2, "eps_high": 0.28, "normalisation": "token_mean"},
    "grpo": {
        "advantage": "grpo",
        "eps_low": 0.2,
        "eps_high": 0.2,
        "normalisation": "seq_mean_token_mean",
        "kl_coef": 0.04,
    },
    "dr_grpo": {"advantage": "dr_grpo", "std": "none", "eps_low": 0.2, "eps_high": 0.2, "normalisation": "constant"},
    "rloo": {"advantage": "rloo", "eps_low": 0.2, "eps_high": 0.2, "normalisation": "seq_mean_token_mean"},
    "reinforce_pp": {"advantage": "reinforce_pp", "eps_low": 0.2, "eps_high": 0.2, "normalisation": "token_mean"},
}
"""Values of each preset (papers: DAPO 2503.14476, GRPO 2402.03300, Dr. GRPO 2503.20783, REINFORCE++ 2501.03262)."""

PRESET_DYNAMIC_SAMPLING = {"dapo": "refill"}
"""`rollout.dynamic_sampling` that a preset brings; `off` for the others."""


class AlgorithmConfig(Section):
    """Advantages, clipping, normalisation, KL and entropy of one policy update."""

    preset: Literal["dapo", "grpo", "dr_grpo", "rloo", "reinforce_pp"] = "dapo"
    """Named set of defaults; any key given beside it wins."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"] = "grpo"
    """How rewards of a group become advantages."""
    std: Literal["population", "sample", "none"] = "population"
    """Standard deviation that `grpo` divides by."""
    shift_mean: bool = True
    """Whitening (`reinforce_pp`, `reinforce_pp_baseline`) subtracts the mean of the batch; false divides only."""
    loss: Literal["ppo"] = "ppo"
    """Token loss, by its name in `algorithms.losses.LOSSES`."""
    eps_low: float = Field(0.2, ge=0, le=1)
    """Lower clip: ratios below 1 - eps_low."""
    eps_high: float = Field(0.28, ge=0)
    """Upper clip: ratios above 1 + eps_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound c of the dual clip for negative advantages (1912.09729; 3 is usual); null = off."""
    normalisation: Literal["token_mean", "seq_mean_token_mean", "constant"] = "token_mean"
    """What the loss is divided by, counted over the whole batch of one optimizer step."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL term to the reference model; 0 = no reference model is built."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """Estimator of that KL. (k1 has zero expected gradient in a loss.)"""
    kl_unbiased: bool = True
    """Multiply the estimator by the importance ratio, which makes its gradient unbiased."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the full-vocabulary entropy bonus."""
    old_logprobs: Literal["recompute", "rollout", "reuse"] = "recompute"
    """Denominator of the ratio: trainer's own pass before the update, the engine's, or the current pass itself."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer steps per rollout batch; groups are dealt evenly over them."""
    max_tokens_per_microbatch: int = Field(16384, ge=2)
    """Strict cap of packed tokens in one forward pass of one rank."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {**PRESETS.get(str(values.get("preset", "dapo")), {}), **values}

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmConfig:
        if self.old_logprobs == "reuse" and self.updates_per_batch != 1:
            raise ValueError(
                f"old_logprobs=reuse means ratio 1, which holds for one update per batch only, but updates_per_batch="
                f"{self.updates_per_batch}; use old_logprobs=recompute"
            )
        return self
