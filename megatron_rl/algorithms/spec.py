"""Plain, frozen options of the pure functions in this package; what they may be, `config` checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.algorithm_rules import CORRECTION_BOUNDS


@dataclass(frozen=True)
class LossSpec:
    """Everything that `losses.policy_loss` needs besides tensors. One spec serves every loss of the registry."""

    kind: str = "ppo"
    """Name in `losses.LOSSES`, or `module:function` for a loss of one's own."""
    args: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further keyword arguments of the loss, such as the temperatures of `sapo`."""
    eps_low: float = 0.2
    """Lower clip: acts on ratios below 1 - eps_low. 1 or more switches it off, since ratios are positive."""
    eps_high: float = 0.28
    """Upper clip: acts on ratios above 1 + eps_high."""
    dual_clip: float | None = None
    """Bound c > 1 on the ratio of tokens with a negative advantage (1912.09729); None = off."""
    kl_coef: float = 0.0
    """β of the KL term to the reference; 0 = no reference log-probs needed."""
    kl_estimator: str = "k3"
    """k2 or k3; k1 has zero expected gradient in a loss."""
    kl_unbiased: bool = True
    """Multiply the estimator by the importance ratio to the old policy."""
    entropy_coef: float = 0.0
    """c of the term -c Σ w H; 0 = no entropy needed."""
    correction: str | None = None
    """Per-token correction for ρ = exp(old - behaviour): tis, icepop or mis; None = off."""
    correction_bounds: tuple[float, float] | None = None
    """Bounds on ρ; None: the usual ones of `CORRECTION_BOUNDS`."""
    sequence_bounds: tuple[float, float] | None = None
    """seq_mis: sequences whose geometric-mean ρ lies outside are rejected; None = off."""

    @property
    def token_bounds(self) -> tuple[float, float]:
        """The bounds that `correction` uses."""
        return self.correction_bounds or CORRECTION_BOUNDS[self.correction or "tis"]

    @property
    def needs_behaviour(self) -> bool:
        """Whether the loss reads the log-probs of the engine."""
        return self.correction is not None or self.sequence_bounds is not None

    @property
    def needs_sequences(self) -> bool:
        """Whether `policy_loss` must be told which sequence each token belongs to, and see whole sequences."""
        from .losses.registry import find_loss

        return self.sequence_bounds is not None or find_loss(self.kind).sequence_terms is not None

    @classmethod
    def from_config(cls, algorithm: Any) -> LossSpec:
        """The spec of a config section `algorithm`. A KL term that acts on the reward is not in the loss."""
        in_reward = algorithm.kl_place == "reward"
        return cls(
            kind=algorithm.loss,
            args=algorithm.loss_args,
            eps_low=algorithm.eps_low,
            eps_high=algorithm.eps_high,
            dual_clip=algorithm.dual_clip,
            kl_coef=0.0 if in_reward else algorithm.kl_coef,
            kl_estimator="k3" if in_reward else algorithm.kl_estimator,
            kl_unbiased=algorithm.kl_unbiased,
            entropy_coef=algorithm.entropy_coef,
            correction=algorithm.token_correction,
            correction_bounds=algorithm.correction_bounds,
            sequence_bounds=algorithm.seq_mis_bounds,
        )


@dataclass(frozen=True)
class AdvantageSpec:
    """How `advantages.compute_advantages` turns rewards into advantages."""

    kind: str = "grpo"
    """grpo, dr_grpo, rloo, reinforce_pp or reinforce_pp_baseline."""
    std: str = "population"
    """What `grpo` divides by: population or sample standard deviation of the group, or none."""
    shift_mean: bool = True
    """Whitening subtracts the batch mean; False divides only."""
    ema_baseline: float = 0.0
    """λ, the share of the running mean reward of a sample's source in the baseline of `grpo`; 0 = off."""

    @classmethod
    def from_config(cls, algorithm: Any) -> AdvantageSpec:
        """The spec of a config section `algorithm`."""
        return cls(
            kind=algorithm.advantage,
            std=algorithm.std,
            shift_mean=algorithm.shift_mean,
            ema_baseline=algorithm.ema_baseline,
        )
