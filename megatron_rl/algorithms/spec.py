"""Plain, frozen options of the pure functions in this package; reading YAML belongs in `megatron_rl.config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KL_ESTIMATORS = ("k2", "k3")
ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
STDS = ("population", "sample", "none")


@dataclass(frozen=True)
class LossSpec:
    """Everything that `losses.policy_loss` needs besides tensors. One spec serves every loss of the registry.

    Raises:
        ValueError: a value outside its range, naming it and what is allowed.
    """

    kind: str = "ppo"
    """Name in `losses.LOSSES`."""
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

    def __post_init__(self) -> None:
        for name in ("eps_low", "eps_high", "kl_coef", "entropy_coef"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}: it must be 0 or greater")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(
                f"dual_clip={self.dual_clip}: it must be greater than 1 (3 is usual), or None to switch it off"
            )
        if self.kl_estimator not in KL_ESTIMATORS:
            raise ValueError(
                f"kl_estimator={self.kl_estimator!r}: a loss takes {' or '.join(KL_ESTIMATORS)}; k1 has zero expected "
                "gradient there and only makes sense in the reward"
            )

    @classmethod
    def from_config(cls, algorithm: Any) -> LossSpec:
        """The spec of a config section `algorithm` (or of any object with these attributes)."""
        return cls(
            kind=algorithm.loss,
            eps_low=algorithm.eps_low,
            eps_high=algorithm.eps_high,
            dual_clip=algorithm.dual_clip,
            kl_coef=algorithm.kl_coef,
            kl_estimator=algorithm.kl_estimator,
            kl_unbiased=algorithm.kl_unbiased,
            entropy_coef=algorithm.entropy_coef,
        )


@dataclass(frozen=True)
class AdvantageSpec:
    """How `advantages.compute_advantages` turns rewards into advantages.

    Raises:
        ValueError: an unknown name, with the allowed ones.
    """

    kind: str = "grpo"
    """One of ADVANTAGES."""
    std: str = "population"
    """What `grpo` divides by: population or sample standard deviation of the group, or none."""
    shift_mean: bool = True
    """Whitening subtracts the batch mean; False divides only."""

    def __post_init__(self) -> None:
        for name, allowed in (("kind", ADVANTAGES), ("std", STDS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"advantage {name}={getattr(self, name)!r}: use one of {', '.join(allowed)}")

    @classmethod
    def from_config(cls, algorithm: Any) -> AdvantageSpec:
        """The spec of a config section `algorithm` (attributes `advantage`, `std` and `shift_mean`)."""
        return cls(kind=algorithm.advantage, std=algorithm.std, shift_mean=algorithm.shift_mean)
