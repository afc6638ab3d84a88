"""The health rules: what is watched, when a rule begins and ends to hold, and what to do about it. No state lives here.

The thresholds come from what is usual for these methods (entropy 0.1-1.0, zero-signal groups 10-30 %, gap about 0.01 in
dense bfloat16). A WARNING compares with the run's own start; an INFO only with a band. Rules about clipping depend on
the loss and are in `clip_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass
class Trend:
    """One metric over the run: where it started, where it is now (smoothed), how much it usually moves."""

    baseline_steps: int
    smoothing: float
    count: int = 0
    start: float = 0.0
    """Mean of the first `baseline_steps` values."""
    last: float = 0.0
    """The newest value itself."""
    now: float = 0.0
    """Exponential moving average."""
    best: float = float("-inf")
    """Highest `now` after the baseline."""
    noise: float = 0.0
    """Moving average of |value - now|, the usual step-to-step movement."""

    def add(self, value: float) -> None:
        """Take in the value of the next step."""
        self.count += 1
        self.last = value
        if self.settled:
            self.noise += self.smoothing * (abs(value - self.now) - self.noise)
            self.now += self.smoothing * (value - self.now)
            self.best = max(self.best, self.now)
            return
        self.noise += (abs(value - self.start) - self.noise) / self.count if self.count > 1 else 0.0
        self.start += (value - self.start) / self.count
        self.now = self.best = self.start

    @property
    def settled(self) -> bool:
        """Whether the baseline is complete; rules are asked only then."""
        return self.count > self.baseline_steps


Trends = Mapping[str, Trend]
Test = Callable[[Trend, Trends], bool]


@dataclass(frozen=True)
class Rule:
    """`begins` must hold `patience` steps in a row for the rule to speak, `ends` as long for it to be over."""

    name: str
    level: Literal["INFO", "WARNING"]
    metric: str
    begins: Test
    ends: Test
    message: str
    """What to do about it; `{now}` and `{start}` are filled in."""


def _solved(trends: Trends) -> bool:
    """With nearly every answer right, a low entropy and groups without a signal are the natural end of a run."""
    trained, held_out = trends.get("reward/correctness"), trends.get("eval/pass_at_1")
    return (trained is not None and trained.now >= 0.9) or (held_out is not None and held_out.last >= 0.9)


def _improved(trends: Trends) -> bool:
    trend = trends.get("reward/correctness") or trends.get("reward/mean")
    return trend is not None and trend.now > trend.start + max(trend.noise, 0.01)


def _fall(trend: Trend) -> float:
    """How far the reward is below its best, in units of what would be remarkable (1 = remarkable)."""
    remarkable = max(4 * trend.noise, 0.2 * abs(trend.best), 1e-6)
    return (trend.best - trend.now) / remarkable


def _off_policy(trends: Trends) -> bool:
    """With tokens of several weight versions the gap grows as the policy moves, and says nothing of the engine."""
    return "rollout/staleness_mean" in trends


RULES: tuple[Rule, ...] = (
    Rule(
        "entropy collapse",
        "WARNING",
        "policy/entropy",
        lambda t, all_: t.now < 0.2 * t.start and t.now < 0.1 and not _solved(all_),
        lambda t, all_: t.now > 0.35 * t.start or t.now > 0.15 or _solved(all_),
        "entropy {now:.3g} has collapsed from {start:.3g} at the start while answers are not solved: raise "
        "algorithm.eps_high or the temperature, or lower optimizer.lr",
    ),
    Rule(
        "entropy growth",
        "WARNING",
        "policy/entropy",
        lambda t, _: t.now > 2 * t.start and t.now > 1.0,
        lambda t, _: t.now < 1.5 * t.start or t.now < 0.8,
        "entropy {now:.3g} keeps growing from {start:.3g} at the start: the policy is drifting towards noise, lower "
        "algorithm.eps_high, algorithm.entropy_coef or optimizer.lr",
    ),
    Rule(
        "response length at the limit",
        "WARNING",
        "rollout/truncated_fraction",
        lambda t, _: t.now > 0.3 and t.now > t.start + 0.15,
        lambda t, _: t.now < 0.2 or t.now < t.start + 0.08,
        "{now:.0%} of the responses hit the length limit ({start:.0%} at the start): raise "
        "rollout.max_response_tokens or set rollout.overlong_cache",
    ),
    Rule(
        "many truncated responses",
        "INFO",
        "rollout/truncated_fraction",
        lambda t, _: t.now > 0.3,
        lambda t, _: t.now < 0.2,
        "{now:.0%} of the responses hit the length limit; their rewards say little about the answer",
    ),
    Rule(
        "response length collapse",
        "WARNING",
        "rollout/response_length_mean",
        lambda t, all_: t.now < 0.4 * t.start and not _improved(all_),
        lambda t, all_: t.now > 0.6 * t.start or _improved(all_),
        "responses shrank to {now:.0f} tokens from {start:.0f} at the start without better answers: look at the "
        "samples in report.html, a reward for form alone invites this",
    ),
    Rule(
        "reward fall",
        "WARNING",
        "reward/mean",
        lambda t, _: _fall(t) > 1.0,
        lambda t, _: _fall(t) < 0.5,
        "the reward fell to {now:.3g} from its best {best:.3g} ({start:.3g} at the start): lower optimizer.lr, and "
        "resume from the best checkpoint if it does not recover",
    ),
    Rule(
        "gradient norm growth",
        "WARNING",
        "optimizer/grad_norm",
        lambda t, _: t.now > 5 * t.start,
        lambda t, _: t.now < 3 * t.start,
        "the gradient norm is {now:.3g}, {start:.3g} at the start: lower optimizer.lr or check the data of the last "
        "steps in report.html",
    ),
    Rule(
        "trainer-engine gap growth",
        "WARNING",
        "gap/mean_abs",
        lambda t, all_: t.now > 3 * t.start and t.now > 0.01 and not _off_policy(all_),
        lambda t, _: t.now < 2 * t.start or t.now < 0.007,
        "trainer and engine disagree by {now:.3g} per token ({start:.3g} at the start): the engine may miss weight "
        "updates or compute at another precision; compare checksums and engine.dtype",
    ),
    Rule(
        "wide trainer-engine gap",
        "INFO",
        "gap/mean_abs",
        lambda t, all_: t.now > 0.05 and not _off_policy(all_),
        lambda t, _: t.now < 0.03,
        "trainer and engine disagree by {now:.3g} per token; about 0.01 is usual for dense bfloat16 models",
    ),
    Rule(
        "few effective samples",
        "WARNING",
        "gap/ess",
        lambda t, _: t.now < 0.5 and t.now < 0.7 * t.start,
        lambda t, _: t.now > 0.65 or t.now > 0.85 * t.start,
        "the ratios of trainer to engine leave an effective sample size of {now:.0%} of the tokens ({start:.0%} at the "
        "start): look at the gap metrics, and set algorithm.corrections if engine and trainer must differ",
    ),
    Rule(
        "groups without a signal",
        "WARNING",
        "rollout/groups_dropped_fraction",
        lambda t, all_: t.now > 0.7 and t.now > t.start + 0.2 and not _solved(all_),
        lambda t, all_: t.now < 0.55 or t.now < t.start + 0.1 or _solved(all_),
        "{now:.0%} of the groups are all right or all wrong and were dropped ({start:.0%} at the start): the prompts "
        "are too easy or too hard by now, mix in others or raise rollout.group_size",
    ),
    Rule(
        "many groups without a signal",
        "INFO",
        "rollout/groups_dropped_fraction",
        lambda t, all_: t.now > 0.7 and not _solved(all_),
        lambda t, all_: t.now < 0.55 or _solved(all_),
        "{now:.0%} of the groups are all right or all wrong and were dropped; 10 to 30 % is usual",
    ),
    Rule(
        "groups dropped for age",
        "WARNING",
        "rollout/stale_dropped_fraction",
        lambda t, _: t.now > 0.2 and t.now > t.start + 0.1,
        lambda t, _: t.now < 0.1 or t.now < t.start + 0.05,
        "{now:.0%} of the groups are dropped since a token is too old ({start:.0%} at the start): long answers are "
        "thrown away and short ones favoured; raise rollout.max_staleness, or set "
        "rollout.stale_policy=keep_with_correction",
    ),
    Rule(
        "many groups dropped for age",
        "INFO",
        "rollout/stale_dropped_fraction",
        lambda t, _: t.now > 0.2,
        lambda t, _: t.now < 0.1,
        "{now:.0%} of the groups are dropped since a token is too old, mostly long answers; see docs/rollouts.md",
    ),
    Rule(
        "tokens grow older",
        "WARNING",
        "rollout/staleness_mean",
        lambda t, _: t.now > 2 * t.start and t.now > t.start + 1.0,
        lambda t, _: t.now < 1.5 * t.start or t.now < t.start + 0.5,
        "tokens are {now:.2g} weight versions behind on average ({start:.2g} at the start): engines fall behind the "
        "trainer; add engines, lower rollout.max_staleness, or watch gap/ess",
    ),
    Rule(
        "routing mismatch grows",
        "WARNING",
        "routing/mismatch_engine",
        lambda t, _: t.now > 2 * t.start and t.now > t.start + 0.05,
        lambda t, _: t.now < 1.5 * t.start or t.now < t.start + 0.03,
        "the engine uses other experts than the trainer for {now:.0%} of (token, layer), {start:.0%} at the start: use "
        "moe.routing_replay=R3, and compare them with megatron-rl preflight --parity",
    ),
    Rule(
        "routes are missing",
        "WARNING",
        "routing/live_share",
        lambda t, _: t.now > 0.05,
        lambda t, _: t.now < 0.02,
        "{now:.0%} of the tokens have no routes to replay and choose their experts anew: look whether every engine "
        "runs with --enable-return-routed-experts and whether files below routes/ were removed",
    ),
    Rule(
        "experts die",
        "WARNING",
        "routing/dead_experts",
        lambda t, _: t.now > t.start + 0.1,
        lambda t, _: t.now < t.start + 0.05,
        "no token chooses {now:.0%} of the experts any more, {start:.0%} at the start: the routers collapse; lower "
        "optimizer.lr, or go back to a checkpoint",
    ),
    Rule(
        "KL to the reference",
        "WARNING",
        "policy/kl_reference",
        lambda t, _: t.now > 0.5 and t.now > t.start + 0.25,
        lambda t, _: t.now < 0.35,
        "the KL to the reference reached {now:.3g} ({start:.3g} at the start): raise algorithm.kl_coef, or lower "
        "optimizer.lr when it rose within a few steps",
    ),
)
