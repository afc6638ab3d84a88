"""The one table of metric names: what each means, in which unit, over which denominator. Holds no values.

The report takes its hover texts and its table of all metrics from here, and a test asks that a run writes no name that
this table does not explain. Denominators follow one rule: token metrics are sums over trainable response tokens divided
by their number, sequence metrics are means over sequences, whatever the loss is normalised by.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class MetricInfo:
    """One row. `<...>` in `name` stands for a part that a run chooses (k of pass@k, a reward component, a phase)."""

    name: str
    meaning: str
    unit: str
    denominator: str
    runs: str = ""
    """In which runs it is written; empty: in all."""


_TOKENS = "trainable response tokens of the batch"
_SEQUENCES = "sequences of the batch"
_TRAINED = "sequences with at least one trainable token"
_ANSWERS = "evaluated samples"
_ONE = "one value a step"
_UNMASKED = "trainable response tokens before any is masked for its age"
_TURNS = "with rollout.environment"
_OFF_POLICY = "asynchronous, one step off, or with partial rollouts"
_MOE = "models with experts"
_ENGINE_ROUTES = "with engine.routed_experts"
_READ = "tokens that are read, x layers"
_LAYERS = "layers with experts"

METRICS: tuple[MetricInfo, ...] = (
    MetricInfo("reward/mean", "total reward after weighting and shaping", "reward", _SEQUENCES),
    MetricInfo("reward/std", "standard deviation of the total reward", "reward", _SEQUENCES),
    MetricInfo("reward/std_within_group", "standard deviation inside a group, averaged", "reward", "groups"),
    MetricInfo("reward/min", "lowest total reward", "reward", _ONE),
    MetricInfo("reward/max", "highest total reward", "reward", _ONE),
    MetricInfo("reward/correctness", "raw correctness before weights and shaping", "0 to 1", _SEQUENCES),
    MetricInfo("reward/errors", "samples whose reward could not be computed in time", "samples", _ONE),
    MetricInfo("reward/<component>", "one component of the reward, before its weight", "component", _SEQUENCES),
    MetricInfo("rollout/response_length_mean", "length of a response, end token included", "tokens", _SEQUENCES),
    MetricInfo("rollout/response_length_max", "longest response", "tokens", _ONE),
    MetricInfo("rollout/response_length_min", "shortest response", "tokens", _ONE),
    MetricInfo("rollout/prompt_length_mean", "length of a prompt", "tokens", _SEQUENCES),
    MetricInfo("rollout/truncated_fraction", "responses cut at the length limit", "share", _SEQUENCES),
    MetricInfo("rollout/turns_mean", "turns of the model in a response", "turns", _SEQUENCES, _TURNS),
    MetricInfo("rollout/turns_max", "most turns of a response", "turns", _ONE, _TURNS),
    MetricInfo(
        "rollout/observation_tokens_mean", "tokens of an environment in a response", "tokens", _SEQUENCES, _TURNS
    ),
    MetricInfo(
        "rollout/environment_errors", "samples not judged since their environment failed", "samples", _ONE, _TURNS
    ),
    MetricInfo("rollout/groups_dropped_fraction", "groups without a learning signal", "share", "groups generated"),
    MetricInfo("rollout/groups_generated", "groups generated to fill the batch", "groups", _ONE),
    MetricInfo("rollout/sample_rounds", "rounds of sampling until the batch was full", "rounds", _ONE),
    MetricInfo("rollout/staleness_mean", "weight versions that a token is behind", "versions", _UNMASKED, _OFF_POLICY),
    MetricInfo("rollout/staleness_max", "most that a token is behind", "versions", _ONE, _OFF_POLICY),
    MetricInfo("rollout/staleness_share_<k>", "tokens that are k versions behind", "share", _UNMASKED, _OFF_POLICY),
    MetricInfo(
        "rollout/staleness_share_over", "tokens further behind than max_staleness", "share", _UNMASKED, _OFF_POLICY
    ),
    MetricInfo(
        "rollout/stale_masked_fraction", "tokens taken out of the loss for their age", "share", _UNMASKED, _OFF_POLICY
    ),
    MetricInfo("rollout/stale_groups_dropped", "groups dropped for the age of a token", "groups", _ONE, _OFF_POLICY),
    MetricInfo(
        "rollout/stale_dropped_fraction", "groups dropped for age", "share", "those and the batch's", _OFF_POLICY
    ),
    MetricInfo("rollout/resumed_tokens", "tokens that resumed groups had already", "tokens", _ONE, _OFF_POLICY),
    MetricInfo("rollout/pool_groups", "groups alive beside the batch", "groups", _ONE, _OFF_POLICY),
    MetricInfo("rollout/pool_groups_partial", "those with an unfinished response", "groups", _ONE, _OFF_POLICY),
    MetricInfo(
        "rollout/pool_age_mean", "versions that their oldest token is behind", "versions", "such groups", _OFF_POLICY
    ),
    MetricInfo("rollout/pool_age_max", "largest such age", "versions", _ONE, _OFF_POLICY),
    MetricInfo("system/engines_serving", "fewest engines that served at once since the last batch", "engines", _ONE),
    MetricInfo("system/engine_outages", "times that an engine stopped serving", "times", _ONE),
    MetricInfo("system/engine_restarts", "engines that were started again", "engines", _ONE),
    MetricInfo("system/retries", "requests sent again: a replica failed, was silent or had no room", "requests", _ONE),
    MetricInfo("rollout/epoch", "passes over the prompts so far", "epochs", _ONE),
    MetricInfo("policy/loss", "policy loss that was minimised", "loss", "as the loss is normalised"),
    MetricInfo("policy/entropy", "entropy over the whole vocabulary", "nats", _TOKENS),
    MetricInfo("policy/clip_fraction", "tokens whose ratio was clipped", "share", _TOKENS),
    MetricInfo("policy/clip_fraction_high", "tokens clipped at 1 + eps_high", "share", _TOKENS),
    MetricInfo("policy/clip_fraction_low", "tokens clipped at 1 - eps_low", "share", _TOKENS),
    MetricInfo("policy/clip_fraction_dual", "tokens held by the dual clip", "share", _TOKENS),
    MetricInfo("policy/clip_fraction_sequences", "share of a sequence that was clipped", "share", _TRAINED),
    MetricInfo("policy/rejected_fraction", "tokens taken out by an off-policy correction", "share", _TOKENS),
    MetricInfo("policy/rejected_fraction_sequences", "sequences taken out whole by seq_mis", "share", _TRAINED),
    MetricInfo("policy/ratio_mean", "ratio of current to old probability", "ratio", _TOKENS),
    MetricInfo("policy/ratio_above_fraction", "ratios above 1 + eps_high, clipped or not", "share", _TOKENS),
    MetricInfo("policy/ratio_below_fraction", "ratios below 1 - eps_low, clipped or not", "share", _TOKENS),
    MetricInfo("policy/log_ratio_sequence_mean", "mean log-ratio of a sequence, as GSPO clips it", "nats", _TRAINED),
    MetricInfo("policy/kl_reference", "KL to the reference model", "nats", _TOKENS),
    MetricInfo("policy/kl_old", "KL to the policy before this batch", "nats", _TOKENS),
    MetricInfo("policy/tokens", "trainable response tokens", "tokens", _ONE),
    MetricInfo("policy/sequences", "sequences with at least one trainable token", "sequences", _ONE),
    MetricInfo("policy/microbatches", "micro-batches on each data-parallel rank", "micro-batches", _ONE),
    MetricInfo("optimizer/grad_norm", "norm of the gradient before clipping", "L2 norm", _ONE),
    MetricInfo("optimizer/lr", "learning rate", "1", _ONE),
    MetricInfo("optimizer/skipped", "updates skipped because a value was not finite", "updates", _ONE),
    MetricInfo(
        "gap/mean_abs", "difference of log-probabilities, trainer to engine at a token's version", "nats", _TOKENS
    ),
    MetricInfo("gap/max_abs", "largest such difference", "nats", _ONE),
    MetricInfo("gap/outside_fraction", "tokens whose ratio to the engine is not in 0.8 to 1.25", "share", _TOKENS),
    MetricInfo("gap/rho_mean", "ratio of old to engine probability, before truncation", "ratio", _TOKENS),
    MetricInfo("gap/rho_max", "largest such ratio", "ratio", _ONE),
    MetricInfo("gap/ess", "effective sample size under these ratios", "share", _TOKENS),
    MetricInfo("gap/log_rho_sequence_mean", "mean log of such ratios in a sequence", "nats", _TRAINED),
    MetricInfo("gap/kl_k3", "KL from engine to trainer (k3 estimate)", "nats", _TOKENS),
    MetricInfo(
        "routing/mismatch_engine", "other experts in the engine than the trainer chose", "share", _READ, _ENGINE_ROUTES
    ),
    MetricInfo(
        "routing/mismatch_engine_max", "the same in the sequence where it is largest", "share", _ONE, _ENGINE_ROUTES
    ),
    MetricInfo("routing/mismatch_old", "other experts in the pass for old log-probs than now", "share", _READ, _MOE),
    MetricInfo("routing/mismatch_old_max", "the same in the sequence where it is largest", "share", _ONE, _MOE),
    MetricInfo(
        "routing/rejected_sequences",
        "sequences taken out of the loss for their mismatch",
        "sequences",
        _ONE,
        "with moe.max_routing_mismatch",
    ),
    MetricInfo(
        "routing/live_rows",
        "tokens that were to be replayed and were not, since nothing is known of them",
        "tokens",
        _ONE,
        "with moe.routing_replay",
    ),
    MetricInfo("routing/live_share", "these, of all tokens", "share", _ONE, "with moe.routing_replay"),
    MetricInfo(
        "routing/load_max_over_mean", "tokens of the fullest expert over those of the mean one", "ratio", _LAYERS, _MOE
    ),
    MetricInfo("routing/entropy", "entropy of what a router makes of a token", "nats", _READ, _MOE),
    MetricInfo("routing/dead_experts", "experts that no token was given to", "share", "experts of all layers", _MOE),
    MetricInfo(
        "routing/mismatch_engine_layer_<k>", "mismatch with the engine in layer k", "share", "tokens", _ENGINE_ROUTES
    ),
    MetricInfo("routing/mismatch_old_layer_<k>", "mismatch with the old pass in layer k", "share", "tokens", _MOE),
    MetricInfo("routing/load_max_over_mean_layer_<k>", "fullest over mean expert of layer k", "ratio", _ONE, _MOE),
    MetricInfo("routing/entropy_layer_<k>", "entropy of the router of layer k", "nats", "tokens", _MOE),
    MetricInfo(
        "routing/dead_experts_layer_<k>", "experts of layer k that no token was given to", "share", "experts", _MOE
    ),
    MetricInfo("eval/pass_at_1", "sampled held-out answers that are right", "share", "held-out prompts"),
    MetricInfo("eval/pass_at_1_low", "lower end of its 95 % interval", "share", "bootstrap over prompts"),
    MetricInfo("eval/pass_at_1_high", "upper end of its 95 % interval", "share", "bootstrap over prompts"),
    MetricInfo("eval/pass_at_<k>", "prompts solved by at least one of k samples", "share", "held-out prompts"),
    MetricInfo("eval/pass_at_<k>_low", "lower end of its 95 % interval", "share", "bootstrap over prompts"),
    MetricInfo("eval/pass_at_<k>_high", "upper end of its 95 % interval", "share", "bootstrap over prompts"),
    MetricInfo("eval/format_valid", "held-out responses in the asked format", "share", _ANSWERS),
    MetricInfo("eval/reward_mean", "total reward on held-out prompts", "reward", _ANSWERS),
    MetricInfo("eval/response_length_mean", "length of a held-out response", "tokens", _ANSWERS),
    MetricInfo("eval/truncated_fraction", "held-out responses cut at the length limit", "share", _ANSWERS),
    MetricInfo("eval/prompts", "held-out prompts evaluated", "prompts", _ONE),
    MetricInfo("eval/samples", "held-out samples evaluated", "samples", _ONE),
    MetricInfo("sft/step", "step of the warm-up", "step", _ONE),
    MetricInfo("sft/loss", "cross-entropy of the warm-up targets", "nats", "target tokens of the batch"),
    MetricInfo("sft/grad_norm", "norm of the gradient before clipping", "L2 norm", _ONE),
    MetricInfo("sft/lr", "learning rate of the warm-up", "1", _ONE),
    MetricInfo("sft/tokens", "target tokens", "tokens", _ONE),
    MetricInfo("sft/<check>", "the check that ends the warm-up, on sampled responses", "share", _ANSWERS),
    MetricInfo("time/step", "wall time of the whole step", "seconds", _ONE),
    MetricInfo("time/generate", "waiting for rollouts", "seconds", _ONE),
    MetricInfo("time/pull", "fetching and sharing the batch", "seconds", _ONE),
    MetricInfo("time/log_probs", "old and reference log-probabilities", "seconds", _ONE),
    MetricInfo("time/train", "forward, backward and optimizer", "seconds", _ONE),
    MetricInfo("time/weights", "new weights to the engines", "seconds", _ONE),
    MetricInfo("time/eval", "held-out evaluation", "seconds", _ONE),
    MetricInfo("time/checkpoint", "writing a checkpoint", "seconds", _ONE),
    MetricInfo("time/<phase>", "another phase of the step", "seconds", _ONE),
    MetricInfo("system/tokens_per_second", "trained tokens per second of the whole step", "tokens/s", _ONE),
    MetricInfo("system/probes_skipped", "probes of weights that busy engines left unanswered, so far", "probes", _ONE),
    MetricInfo("system/rss_gib", "resident memory of rank 0", "GiB", _ONE),
    MetricInfo(
        "system/non_finite_metrics",
        "metrics of this step that were NaN or infinite",
        "metrics",
        "absent means 0",
        "with such a value",
    ),
)


def describe(name: str) -> MetricInfo | None:
    """The row that explains `name`, an exact name before a pattern; None when no row does."""
    exact, patterns = _index()
    if name in exact:
        return exact[name]
    return next((info for pattern, info in patterns if pattern.fullmatch(name)), None)


def undocumented(names: Iterable[str]) -> list[str]:
    """Those metric names (anything with a `/`) that the table does not explain, sorted."""
    return sorted(name for name in names if "/" in name and describe(name) is None)


@cache
def _index() -> tuple[dict[str, MetricInfo], list[tuple[re.Pattern[str], MetricInfo]]]:
    exact = {info.name: info for info in METRICS if "<" not in info.name}
    patterns = [(re.compile(_pattern(info.name)), info) for info in METRICS if "<" in info.name]
    return exact, patterns


def _pattern(name: str) -> str:
    """`<k>` matches a number, any other placeholder one path segment or more."""
    parts = re.split(r"(<\w+>)", name)
    return "".join({"<k>": r"\d+"}.get(part, ".+") if part.startswith("<") else re.escape(part) for part in parts)
