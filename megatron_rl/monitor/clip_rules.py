"""Health rules about clipping, with thresholds of each loss; all other rules are in `health_rules`.

They are asked only with several updates per batch: with one, every ratio is near 1 and nothing clips.
"""

from __future__ import annotations

from .health_rules import Rule

LIMITS: dict[str, tuple[float, float] | None] = {
    "ppo": (0.3, 0.2),
    "gspo": (0.5, 0.35),
    "gspo_token": (0.5, 0.35),
    "cispo": (0.1, 0.05),
    "gmpo": (0.3, 0.2),
    "sapo": None,
    "opmd": None,
}
"""By loss: the share of clipped tokens that is too much, and the share at which that is over. None: it clips nothing.

The bounds of `gspo` are so narrow that a sixth of all tokens is usual (2507.18071); the cap of `cispo` is so wide that
hardly any token should reach it."""


def clip_rules(loss: str) -> tuple[Rule, ...]:
    """The rules for `algorithm.loss`; a loss of one's own is judged like `ppo`."""
    limits = LIMITS.get(loss, LIMITS["ppo"])
    if limits is None:
        return ()
    return _too_much(*limits) + (_too_narrow() if loss == "ppo" else ())


def _too_much(limit: float, over: float) -> tuple[Rule, ...]:
    return (
        Rule(
            "clip fraction growth",
            "WARNING",
            "policy/clip_fraction",
            lambda t, _: t.now > limit and t.now > t.start + limit / 3,
            lambda t, _: t.now < over or t.now < t.start + limit / 6,
            "{now:.0%} of the tokens are clipped ({start:.0%} at the start): the updates of a batch move too far, "
            "lower optimizer.lr or algorithm.updates_per_batch",
        ),
        Rule(
            "high clip fraction",
            "INFO",
            "policy/clip_fraction",
            lambda t, _: t.now > limit,
            lambda t, _: t.now < over,
            f"{{now:.0%}} of the tokens are clipped; this loss should stay below {limit:.0%} with several updates per "
            "batch",
        ),
    )


def _too_narrow() -> tuple[Rule, ...]:
    """Ratios beyond a bound, whether or not the advantage lets it act."""
    return (
        Rule(
            "narrow upper clip",
            "INFO",
            "policy/ratio_above_fraction",
            lambda t, _: t.now > 0.05,
            lambda t, _: t.now < 0.03,
            "{now:.0%} of the ratios lie above 1 + eps_high, 5 % is much: raise algorithm.eps_high or lower "
            "optimizer.lr",
        ),
        Rule(
            "narrow lower clip",
            "INFO",
            "policy/ratio_below_fraction",
            lambda t, _: t.now > 0.1,
            lambda t, _: t.now < 0.07,
            "{now:.0%} of the ratios lie below 1 - eps_low, 10 % is much: raise algorithm.eps_low or lower "
            "optimizer.lr",
        ),
    )
