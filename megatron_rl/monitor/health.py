"""When the numbers of a run deserve a word. Speaks only; it never changes a run, and the rules are in `health_rules`.

A WARNING needs a trend away from the run's own start that lasts; a value outside its usual band only informs. Each rule
speaks once when it begins to hold and once when it has clearly ended, so a healthy run is silent.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from .clip_rules import clip_rules
from .health_rules import RULES, Rule, Trend
from .metrics import MetricValue


class HealthMonitor:
    """Watches the metrics of a run and returns lines beginning with `WARNING` or `INFO` when they are due.

    >>> monitor = HealthMonitor(updates_per_batch=1, baseline_steps=2, patience=2, smoothing=1.0)
    >>> [len(monitor.observe(step, {"gap/mean_abs": gap})) for step, gap in enumerate([0.01, 0.01, 0.04, 0.04, 0.04])]
    [0, 0, 0, 1, 0]
    """

    def __init__(
        self,
        *,
        updates_per_batch: int = 1,
        loss: str = "ppo",
        baseline_steps: int = 10,
        patience: int = 5,
        smoothing: float = 0.2,
    ) -> None:
        """Clipping is watched only with several updates per batch (with one, every ratio is near 1), as suits `loss`.

        `baseline_steps` values make the start of a trend, a rule must hold `patience` steps in a row to speak, and
        `smoothing` is the weight of a new value in the moving average.
        """
        self._baseline_steps, self._patience, self._smoothing = baseline_steps, patience, smoothing
        rules = (*RULES, *clip_rules(loss)) if updates_per_batch > 1 else RULES
        self._rules = sorted(rules, key=lambda rule: rule.level != "WARNING")
        self._watched = {rule.metric for rule in rules} | {"reward/correctness", "eval/pass_at_1"}
        self._trends: dict[str, Trend] = {}
        self._streak = {rule.name: 0 for rule in rules}
        self._speaking: dict[str, Rule] = {}
        self._grad_norms: deque[float] = deque(maxlen=20)
        self._idle = False

    def observe(self, step: int, metrics: Mapping[str, MetricValue]) -> list[str]:
        """Take in one step; metrics that are missing or None count as not measured. Returns the lines now due."""
        for name in self._watched:
            value = metrics.get(name)
            if value is not None:
                self._trends.setdefault(name, Trend(self._baseline_steps, self._smoothing)).add(value)
        lines = [line for rule in self._rules if metrics.get(rule.metric) is not None for line in self._ask(rule)]
        return lines + self._spike(step, metrics) + self._nothing_trained(step, metrics)

    def _nothing_trained(self, step: int, metrics: Mapping[str, MetricValue]) -> list[str]:
        """Told at once, and once for each row of such steps: it is a fact, not a trend."""
        tokens = metrics.get("policy/tokens")
        if tokens is None:
            return []
        before, self._idle = self._idle, tokens == 0
        if before or not self._idle:
            return []
        return [
            f"WARNING nothing trained: no token of step {step} was trained on, every sample is masked: by "
            "rollout.overlong_filter, by rollout.dynamic_sampling=mask, or because its verifier failed"
        ]

    def _ask(self, rule: Rule) -> list[str]:
        trend = self._trends[rule.metric]
        if not trend.settled or self._said_as_warning(rule):
            return []
        speaking = rule.name in self._speaking
        turned = (rule.ends if speaking else rule.begins)(trend, self._trends)
        self._streak[rule.name] = self._streak[rule.name] + 1 if turned else 0
        if self._streak[rule.name] < self._patience:
            return []
        self._streak[rule.name] = 0
        if speaking:
            del self._speaking[rule.name]
            return [f"INFO {rule.name}: over, now {trend.now:.3g}"]
        self._speaking[rule.name] = rule
        return [f"{rule.level} {rule.name}: " + rule.message.format(now=trend.now, start=trend.start, best=trend.best)]

    def _said_as_warning(self, rule: Rule) -> bool:
        """A value that both left its band and moved away from its start is told once, as the warning."""
        return rule.level == "INFO" and any(
            other.level == "WARNING" and other.metric == rule.metric for other in self._speaking.values()
        )

    def _spike(self, step: int, metrics: Mapping[str, MetricValue]) -> list[str]:
        """A single step far out of line with the last ones (a trend would see it too late or not at all)."""
        value = metrics.get("optimizer/grad_norm")
        if value is None:
            return []
        usual = statistics.median(self._grad_norms) if len(self._grad_norms) >= 10 else value
        self._grad_norms.append(value)
        said = f"INFO gradient spike: step {step} had a gradient norm of {value:.3g}, {usual:.3g} is usual lately"
        return [said] if value > max(20 * usual, 1.0) else []
