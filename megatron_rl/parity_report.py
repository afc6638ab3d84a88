"""What a comparison of engine and trainer has found, in numbers and in words; nothing is computed by a model here.

`parity.py` makes the evidence. A cause is named because something was tried that shows it, never from a list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from megatron_rl.files import write_atomic

USUAL_RHO = (0.8, 1.25)
MEAN = {"float32": 1e-4, "bfloat16": 3e-2}
"""Largest mean |Δ log p| that numbers of this format explain, nats."""
OUTSIDE = 0.02
"""Largest share of tokens whose ratio is outside of USUAL_RHO."""
UNUSUAL = 6.0
"""Standard deviations by which sampled tokens may be likelier, or less likely, than the distribution has it."""


@dataclass(frozen=True)
class Gap:
    """Differences d = trainer - engine of log-probs, and ratios exp(d), over all compared tokens."""

    tokens: int
    mean_abs: float
    max_abs: float
    mean: float
    std: float
    kl_k3: float
    outside: float
    ess: float

    @classmethod
    def of(cls, trainer: np.ndarray, engine: np.ndarray) -> Gap:
        """From two arrays [T]; computed in float64."""
        d = trainer.astype(np.float64) - engine.astype(np.float64)
        rho = np.exp(np.clip(d, -20, 20))
        outside = (rho < USUAL_RHO[0]) | (rho > USUAL_RHO[1])
        return cls(
            tokens=d.size,
            mean_abs=float(np.abs(d).mean()),
            max_abs=float(np.abs(d).max()),
            mean=float(d.mean()),
            std=float(d.std()),
            kl_k3=float((np.expm1(np.clip(d, -20, 20)) - np.clip(d, -20, 20)).mean()),
            outside=float(outside.mean()),
            ess=float(rho.sum() ** 2 / (d.size * (rho**2).sum())),
        )

    def within(self, dtype: str) -> bool:
        """Whether rounding in `dtype` explains it."""
        return self.mean_abs <= MEAN[dtype] and self.outside <= OUTSIDE


@dataclass(frozen=True)
class Evidence:
    """What was measured; None where something was not tried, since the log-probs agreed, or cannot be."""

    prompts: int
    temperature: float
    trainer_dtype: str
    engine_dtype: str | None
    gap: Gap
    """At the sampling temperature, of sampled tokens."""
    likelier: float | None
    """By how many standard deviations sampled tokens are likelier than the trainer's distribution has it."""
    other_tokens: str | None
    """How the tokens that the engine saw differ from those that were sent."""
    scored: Gap | None = None
    """Of the same tokens, which the engine was asked to score at temperature 1."""
    fitted_temperature: float | None = None
    """The temperature at which the trainer is nearest to the engine, and how near."""
    fitted: Gap | None = None
    above: float | None = None
    """Share of tokens that the engine finds at least as likely as the trainer does."""
    rounded: Gap | None = None
    """As `scored`, with the trainer's weights rounded to bfloat16."""
    changed: list[str] | None = None
    """Parameters that had other values before the engine read the weights of model.path again."""
    reloaded: Gap | None = None
    """As `scored`, after that."""
    fp32_head: bool | None = None
    """Whether the engine computes its logits in float32, where it says so."""

    def write(self, path: Path) -> None:
        """As JSON, atomically."""
        write_atomic(path, orjson.dumps(asdict(self)).decode())

    @classmethod
    def read(cls, path: Path) -> Evidence:
        """Inverse of `write`."""
        values: dict[str, Any] = orjson.loads(path.read_bytes())
        gaps = ("gap", "scored", "fitted", "rounded", "reloaded")
        return cls(**values | {name: Gap(**values[name]) for name in gaps if values[name] is not None})


@dataclass(frozen=True)
class Cause:
    """Something that is wrong, and what shows it."""

    name: str
    says: str


def table(e: Evidence) -> list[tuple[str, str]]:
    """What was measured, as rows of two words or numbers."""
    gap = e.gap
    rows = [
        ("prompts", str(e.prompts)),
        ("tokens compared", str(gap.tokens)),
        ("temperature", f"{e.temperature:g}"),
        ("trainer, engine", f"{e.trainer_dtype}, {e.engine_dtype or 'does not say'}"),
        ("mean |Δ log p|", f"{gap.mean_abs:.3e}"),
        ("max |Δ log p|", f"{gap.max_abs:.3e}"),
        ("KL (k3)", f"{gap.kl_k3:.3e}"),
        (f"ratio outside {USUAL_RHO[0]} .. {USUAL_RHO[1]}", f"{gap.outside:.2%}"),
        ("effective sample size", f"{gap.ess:.6f}"),
    ]
    if e.likelier is not None:
        rows.append(("tokens likelier than expected", f"{e.likelier:+.1f} standard deviations"))
    tried = (
        ("scored at temperature 1", e.scored),
        (f"trainer at temperature {e.fitted_temperature or 0:.3g}", e.fitted),
        ("after reading the weights again", e.reloaded),
        ("trainer's weights in bfloat16", e.rounded),
    )
    return rows + [(f"mean |Δ log p|, {what}", f"{found.mean_abs:.3e}") for what, found in tried if found is not None]


def causes(e: Evidence) -> Iterator[Cause]:
    """What is wrong, the most likely first; nothing when engine and trainer agree."""
    if e.other_tokens:
        yield Cause(
            "tokens",
            f"the engine did not see the tokens that were sent: {e.other_tokens}; look at what stands between (a "
            "router, a proxy), and whether the engine adds tokens of its own",
        )
    if e.gap.within(e.trainer_dtype):
        yield from _sampled_otherwise(e)
        return
    if e.scored is not None and e.scored.within(e.trainer_dtype):
        yield from _sampling(e)
    else:
        yield from _model(e)


def _sampled_otherwise(e: Evidence) -> Iterator[Cause]:
    """The numbers are right, but tokens are drawn from another distribution than they describe."""
    if e.likelier is not None and abs(e.likelier) > UNUSUAL:
        how = "likelier" if e.likelier > 0 else "less likely"
        what = "top_p, top_k, min_p or a penalty in the engine's defaults" if e.likelier > 0 else "a penalty"
        yield Cause(
            "top-p",
            f"log-probs agree, but the sampled tokens are {how} than they should be by {abs(e.likelier):.0f} standard "
            f"deviations: the engine samples from a filtered distribution; look for {what}, and a temperature that is "
            "set on the way",
        )


def _sampling(e: Evidence) -> Iterator[Cause]:
    """The engine scores the very tokens as the trainer does: the model is right, the sampling settings are not."""
    start = f"scored at temperature 1, the same tokens differ by {e.scored.mean_abs:.1e} only" if e.scored else ""
    if e.fitted is not None and e.fitted.within(e.trainer_dtype):
        yield Cause(
            "temperature",
            f"{start}; sampled ones fit temperature {e.fitted_temperature:.3g} (gap {e.fitted.mean_abs:.1e}), not "
            f"rollout.temperature={e.temperature:g} (gap {e.gap.mean_abs:.1e}): the engine does not use what it is "
            "asked for, or reports log-probs of another temperature",
        )
    elif e.above is not None and e.above > 0.99:
        yield Cause(
            "top-p",
            f"{start}; of sampled ones the engine finds {e.above:.0%} at least as likely as the trainer: its log-probs "
            "are those of a filtered distribution; look for top_p, top_k and min_p in the engine's defaults",
        )
    else:
        yield Cause(
            "sampling",
            f"{start}; sampled ones by {e.gap.mean_abs:.1e}, at no temperature less than "
            f"{e.fitted.mean_abs if e.fitted else e.gap.mean_abs:.1e}: look for penalties, a logit bias or speculative "
            "decoding in engine.extra_args",
        )


def _model(e: Evidence) -> Iterator[Cause]:
    """The engine's model itself gives other numbers."""
    if e.changed and e.reloaded is not None and e.scored is not None:
        yield Cause(
            "weights",
            f"the engine held other weights than model.path: {len(e.changed)} parameters changed when it read them "
            f"again, first {e.changed[0]}, and the gap went from {e.scored.mean_abs:.1e} to {e.reloaded.mean_abs:.1e}",
        )
        if e.reloaded.within(e.trainer_dtype):
            return
    rest = e.reloaded or e.scored or e.gap
    if e.engine_dtype not in (None, e.trainer_dtype) and rest.within("bfloat16"):
        tried = "" if e.rounded is None else (
            f"; with the trainer's weights rounded to bfloat16 as well it is {e.rounded.mean_abs:.1e}"
        )  # fmt: skip
        yield Cause(
            "dtype",
            f"the engine computes in {e.engine_dtype}, the trainer in {e.trainer_dtype}, which explains a gap of "
            f"{rest.mean_abs:.1e}{tried}: set engine.dtype={e.trainer_dtype}, or live with it under "
            "algorithm.corrections=[tis]",
        )
    elif rest.std < 0.1 * abs(rest.mean):
        yield Cause(
            "vocabulary",
            f"all tokens differ by nearly the same {rest.mean:+.3g}: one side counts entries of the vocabulary that "
            "the other does not; look at vocab_size in config.json and at padding of the output layer",
        )
    elif e.trainer_dtype == e.engine_dtype == "bfloat16" and e.fp32_head is False:
        yield Cause(
            "head",
            f"both compute in bfloat16 and differ by {rest.mean_abs:.1e}: the engine's logits are rounded to bfloat16, "
            "the trainer's are not; add --enable-fp32-lm-head to engine.extra_args",
        )
    else:
        weights = "the same weights" if e.changed is not None else "weights not read again (see --reload-engine)"
        yield Cause(
            "model code",
            f"the same tokens, scored at temperature 1 with {weights}, differ by {rest.mean_abs:.1e}: the two "
            "implementations compute something else (rope, norms, attention); compare layer by layer with "
            "`megatron-rl convert verify`",
        )
