"""Section `algorithm:`, what the policy update computes. Presets fill what the user leaves out."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from .algorithm_rules import CORRECTION_BOUNDS, problems
from .base import Score, Section, Weight

_CLIP: dict[str, Any] = {"advantage": "grpo", "loss": "ppo", "eps_low": 0.2, "eps_high": 0.2, "kl_coef": 0.0}

PRESETS: dict[str, dict[str, Any]] = {
    "dapo": {**_CLIP, "eps_high": 0.28, "normalisation": "token_mean"},
    "grpo": {**_CLIP, "normalisation": "seq_mean_token_mean", "kl_coef": 0.04},
    "dr_grpo": {**_CLIP, "advantage": "dr_grpo", "std": "none", "normalisation": "constant"},
    "gspo": {**_CLIP, "loss": "gspo", "eps_low": 3e-4, "eps_high": 4e-4, "normalisation": "seq_mean_token_mean"},
    "cispo": {**_CLIP, "loss": "cispo", "eps_low": 1.0, "eps_high": 4.0, "normalisation": "token_mean"},
    "rloo": {**_CLIP, "advantage": "rloo", "normalisation": "seq_mean_token_mean"},
    "reinforce_pp": {**_CLIP, "advantage": "reinforce_pp", "normalisation": "token_mean"},
}
"""Values of each preset. Papers: DAPO 2503.14476, GRPO 2402.03300, Dr. GRPO 2503.20783, GSPO 2507.18071, CISPO
2506.13585, RLOO 2402.14740, REINFORCE++ 2501.03262. An eps_low of 1 is no lower bound: ratios are positive."""

PRESET_DYNAMIC_SAMPLING = {"dapo": "refill"}
"""`rollout.dynamic_sampling` that a preset brings; `off` for the others."""

PRESET_OVERLONG_SHARE = {"dapo": 0.2}
"""`rollout.overlong_cache` that a preset brings, as a share of the longest response (DAPO: 4096 of 20480)."""


class AlgorithmConfig(Section):
    """Advantages, loss, normalisation, KL, entropy and off-policy corrections of one policy update."""

    preset: Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp"] = "dapo"
    """Named set of defaults; any key given beside it wins."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"] = "grpo"
    """How rewards of a group become advantages."""
    std: Literal["population", "sample", "none"] = "population"
    """Standard deviation that `grpo` divides by."""
    shift_mean: bool = True
    """Whitening (`reinforce_pp`, `reinforce_pp_baseline`) subtracts the mean of the batch; false divides only."""
    ema_baseline: float = Field(0.0, ge=0, lt=1)
    """Share of the running mean reward of a prompt's source in the baseline of `grpo`; 0 = off, 0.1 is usual."""
    ema_decay: float = Field(0.9, ge=0, lt=1)
    """How much of that running mean is kept from one step to the next."""
    loss: str = "ppo"
    """Token loss: ppo, gspo, gspo_token, cispo, sapo, gmpo, opmd, or `module:function` for a function of your own."""
    loss_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the loss: tau_positive and tau_negative of sapo, tau of opmd, or those of your function."""
    eps_low: float = Field(0.2, ge=0, le=1)
    """Lower clip: ratios below 1 - eps_low; 1 = none."""
    eps_high: float = Field(0.28, ge=0, le=10)
    """Upper clip: ratios above 1 + eps_high."""
    dual_clip: float | None = Field(None, gt=1, le=1e6)
    """Bound c of the dual clip for negative advantages (1912.09729; 3 is usual); null = off. Only with `ppo`."""
    normalisation: Literal["token_mean", "seq_mean_token_mean", "constant"] = "token_mean"
    """What the loss is divided by, counted over the whole batch of one optimizer step."""
    kl_coef: Weight = 0.0
    """Weight of the KL term to the reference model; 0 = no reference model is built."""
    kl_place: Literal["loss", "reward"] = "loss"
    """Where it acts: as a term of the loss (k2, k3), or subtracted from the reward before group statistics (k1)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL; k1 belongs into the reward, where it is the default, since a loss of it has no gradient."""
    kl_unbiased: bool = True
    """Multiply the estimator in the loss by the importance ratio, which makes its gradient unbiased."""
    entropy_coef: Weight = 0.0
    """Weight of the full-vocabulary entropy bonus."""
    old_logprobs: Literal["recompute", "rollout", "reuse"] = "recompute"
    """Denominator of the ratio: trainer's own pass before the update, the engine's, or the current pass itself."""
    corrections: list[Literal["tis", "icepop", "mis", "seq_mis"]] = Field(default_factory=list)
    """For the gap between engine and trainer: one of tis, icepop and mis for tokens; seq_mis for whole sequences."""
    correction_bounds: tuple[Score, Score] | None = None
    """Bounds on the ratio of the old to the engine's probability; unless given, 0 .. 2 for tis, else 0.5 .. 5."""
    seq_mis_bounds: tuple[Score, Score] | None = None
    """Bounds on the geometric mean of that ratio over a sequence; needed with seq_mis."""
    renormalise_after_rejection: bool = False
    """Count the denominators again without the rejected tokens."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer steps per rollout batch; groups are dealt evenly over them."""
    max_tokens_per_microbatch: int = Field(16384, ge=2)
    """Strict cap of packed tokens in one forward pass of one model replica; context-parallel ranks share them."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = {**PRESETS.get(str(values.get("preset", "dapo")), {}), **values}
        if values.get("kl_place") == "reward":
            values.setdefault("kl_estimator", "k1")
        corrections = values.get("corrections")
        if isinstance(corrections, str):
            values["corrections"] = corrections = [corrections]
        if isinstance(corrections, list | tuple) and values.get("correction_bounds") is None:
            for name in corrections:
                if isinstance(name, str) and name in CORRECTION_BOUNDS:
                    values["correction_bounds"] = CORRECTION_BOUNDS[name]
        return values

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmConfig:
        found = list(problems(self))
        if found:
            raise ValueError("\n".join(found))
        return self

    @property
    def token_correction(self) -> str | None:
        """The one correction of `corrections` that acts on single tokens."""
        return next((name for name in self.corrections if name != "seq_mis"), None)
