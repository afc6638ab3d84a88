"""Checks that need several sections, the model's config.json or the data files; run before any process starts.

Weights are looked at in `megatron_rl.preflight`: what they should be is known to `megatron_rl.weights`.

Each check is a small function that yields complaints; `check` collects them, so a user repairs everything at once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from .algorithm_rules import REJECTING
from .base import ConfigError
from .engine_checks import engine_problems
from .hf_config import HfConfig, read_hf_config
from .layout_checks import layout_problems
from .moe_checks import routing_problems
from .quantised import quantisation_problems
from .schema import Config

_NO_SHARES = ("reward_mean", "response_length_mean")
"""Metrics of an evaluation that may be larger than 1."""


def check(cfg: Config, with_files: bool = True) -> HfConfig:
    """Refuse what cannot run; returns the model's facts.

    Args:
        cfg: the configuration.
        with_files: also look for the data; without, of files only the model's config.json is read.

    Raises:
        ConfigError: listing every problem found, each with key, value, what is allowed and what to do.
    """
    hf = read_hf_config(cfg.model.path)
    checks = (
        layout_problems(cfg, hf),
        _lengths(cfg, hf),
        _batch(cfg),
        _least(cfg),
        _files(cfg) if with_files else (),
        _advantages(cfg),
        _rejection(cfg),
        _loss(cfg),
        _watched(cfg),
        _environment(cfg),
        _off_policy(cfg),
        _weight_transport(cfg),
        quantisation_problems(cfg),
        engine_problems(cfg, hf),
        routing_problems(cfg, hf),
    )
    problems = [problem for found in checks for problem in found]
    if problems:
        raise ConfigError("the configuration cannot run:\n" + "\n".join(f"  - {p}" for p in problems))
    return hf


def _lengths(cfg: Config, hf: HfConfig) -> Iterator[str]:
    r = cfg.rollout
    total = r.longest_sequence
    if total > hf.max_position_embeddings:
        yield (
            f"rollout.max_prompt_tokens={r.max_prompt_tokens} + rollout.max_response_tokens={r.max_response_tokens} = "
            f"{total} exceeds the model's context of {hf.max_position_embeddings} tokens; lower one of them"
        )
    if cfg.engine.context_length is not None and total > cfg.engine.context_length:
        yield (
            f"engine.context_length={cfg.engine.context_length} cannot hold the longest sequence of {total} tokens "
            "(rollout.max_prompt_tokens + rollout.max_response_tokens); raise it, or leave it out"
        )
    if total > cfg.algorithm.max_tokens_per_microbatch:
        yield (
            f"algorithm.max_tokens_per_microbatch={cfg.algorithm.max_tokens_per_microbatch} cannot hold the longest "
            f"sequence of {total} tokens (rollout.max_prompt_tokens + rollout.max_response_tokens); raise it"
        )


def _batch(cfg: Config) -> Iterator[str]:
    groups, updates, dp = cfg.rollout.groups_per_step, cfg.algorithm.updates_per_batch, cfg.parallel.data_parallel_size
    if groups % updates:
        yield f"algorithm.updates_per_batch={updates} does not divide rollout.groups_per_step={groups}"
    samples = cfg.rollout.samples_per_step // updates
    if samples % dp:
        yield (
            f"parallel.data_parallel_size={dp} does not divide the {samples} samples of one update "
            "(rollout.groups_per_step x rollout.group_size / algorithm.updates_per_batch)"
        )


def _least(cfg: Config) -> Iterator[str]:
    """Sizes down to which a run may shrink."""
    c, replicas = cfg.cluster, cfg.engine.replicas
    for key, least, configured, value in (
        ("min_dp", c.min_dp, "parallel.data_parallel_size", cfg.parallel.data_parallel_size),
        ("min_replicas", None if cfg.engine.urls else c.min_replicas, "engine.replicas", replicas),
    ):
        if least is not None and least > value:
            yield f"cluster.{key}={least} is more than {configured}={value}; lower it, or leave it out"


def _files(cfg: Config) -> Iterator[str]:
    paths = {"data.prompts": cfg.data.prompts, "data.eval_prompts": cfg.data.eval_prompts, "sft.data": cfg.sft.data}
    paths["data.chat_template"] = cfg.data.chat_template
    for key, path in paths.items():
        if path is not None and not Path(path).is_file():
            yield f"{key}={path!r}: " + ("not a regular file" if Path(path).exists() else "no such file")
        elif path is not None and Path(path).stat().st_size == 0:
            yield f"{key}={path!r}: the file is empty"
    if cfg.sft.data is not None and cfg.sft.stop_value is not None and cfg.data.eval_prompts is None:
        yield f"sft.stop_value={cfg.sft.stop_value} needs held-out prompts; set data.eval_prompts, or stop_value=null"


def _advantages(cfg: Config) -> Iterator[str]:
    size, a = cfg.rollout.group_size, cfg.algorithm
    if size < 2 and a.advantage != "reinforce_pp":
        yield (
            f"rollout.group_size={size}: advantage={a.advantage} compares samples of one prompt and needs at least 2; "
            "raise it, or use algorithm.advantage=reinforce_pp"
        )
    if cfg.rollout.dynamic_sampling != "off" and size < 2:
        yield f"rollout.dynamic_sampling={cfg.rollout.dynamic_sampling} needs rollout.group_size >= 2, not {size}"
    if a.std == "none" and a.advantage not in ("grpo", "dr_grpo"):
        yield f"algorithm.std=none has no meaning with advantage={a.advantage}; leave it out"
    if not a.shift_mean and not a.advantage.startswith("reinforce_pp"):
        yield f"algorithm.shift_mean=false has no meaning with advantage={a.advantage}; leave it out"


def _rejection(cfg: Config) -> Iterator[str]:
    a, limit = cfg.algorithm, cfg.moe.max_routing_mismatch
    if a.renormalise_after_rejection and limit is None and not set(a.corrections) & set(REJECTING):
        yield (
            f"algorithm.renormalise_after_rejection=true: nothing rejects tokens; add one of {', '.join(REJECTING)} to "
            "algorithm.corrections, with experts set moe.max_routing_mismatch, or leave it out"
        )


def _loss(cfg: Config) -> Iterator[str]:
    if cfg.loss.logprob_backend != "te":
        return
    if cfg.algorithm.entropy_coef:
        yield (
            f"loss.logprob_backend=te computes no entropy, but algorithm.entropy_coef={cfg.algorithm.entropy_coef}; "
            "use loss.logprob_backend=auto"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        yield (
            "loss.logprob_backend=te needs Transformer Engine, which is not installed here; "
            "install it, or use loss.logprob_backend=auto"
        )


def _watched(cfg: Config) -> Iterator[str]:
    """Metrics that the run acts on must be among those that its evaluations measure."""
    measured = [f"pass_at_{k}" for k in sorted({1, *cfg.eval.ks})]
    measured += ["reward_mean", "response_length_mean", "truncated_fraction"]
    if any(c.name == "format" or c.name.endswith("_format") for c in cfg.reward.components):
        measured.append("format_valid")
    hint = f"one of {', '.join(measured)} (format_valid needs a reward component whose name ends with _format)"
    warm_up = [m for m in measured if not m.startswith("pass_at_")] + ["pass_at_1"]  # one sample for each prompt
    sft = cfg.sft
    if sft.data is not None and sft.stop_value is not None and sft.stop_metric not in warm_up:
        yield f"sft.stop_metric={sft.stop_metric!r} is not measured; {hint}"
    if sft.stop_value is not None and sft.stop_metric not in _NO_SHARES and not 0 <= sft.stop_value <= 1:
        yield f"sft.stop_value={sft.stop_value}: {sft.stop_metric} is a share; write a number from 0 to 1, or null"
    checkpoint = cfg.checkpoint
    if checkpoint.keep_best and checkpoint.metric not in [f"eval/{m}" for m in measured]:
        yield f"checkpoint.metric={checkpoint.metric!r} is not measured; eval/ and {hint}"


def _environment(cfg: Config) -> Iterator[str]:
    if cfg.rollout.environment is None and any(c.name == "environment" for c in cfg.reward.components):
        yield (
            "reward.components: environment is what an environment gives for its turns; set "
            "rollout.environment=module:Class, or leave this component out"
        )


def _off_policy(cfg: Config) -> Iterator[str]:
    r = cfg.rollout
    if cfg.engine.pause_mode == "in_place" and r.mode != "async":
        yield (
            f"engine.pause_mode=in_place with rollout.mode={r.mode}: no request runs during an update; leave it out, "
            "or use rollout.mode=async"
        )
    if not r.off_policy:
        return
    what = f"rollout.mode={r.mode}" if r.mode != "sync" else "rollout.partial_rollouts=true"
    if cfg.deterministic:
        yield f"deterministic=true: with {what} timing decides what is trained on; use rollout.mode=sync"
    if cfg.cluster.placement == "colocated" and r.mode != "sync":
        yield (
            f"{what}: with cluster.placement=colocated engines and trainer take turns on the same devices; use "
            "rollout.mode=sync (rollout.partial_rollouts=true is possible), or placement=disaggregated"
        )
    corrected = cfg.algorithm.corrections or cfg.algorithm.old_logprobs == "rollout"
    if r.stale_policy == "keep_with_correction" and not corrected:
        yield (
            "rollout.stale_policy=keep_with_correction with algorithm.corrections=[]: nothing corrects old tokens; "
            "use corrections=[tis], or stale_policy=drop"
        )


def _weight_transport(cfg: Config) -> Iterator[str]:
    e = cfg.engine
    if e.weight_transport in ("broadcast", "ipc") and e.dp != 1:
        yield (
            f"engine.weight_transport={e.weight_transport} with engine.dp={e.dp}: SGLang takes tensors with dp=1 only; "
            "use weight_transport=disk, or more engine.replicas instead of dp"
        )
    if e.weight_transport == "ipc" and cfg.cluster.placement != "colocated":
        yield (
            "engine.weight_transport=ipc: engines get handles of the trainer's memory and must share its devices; use "
            "cluster.placement=colocated, or weight_transport=broadcast"
        )
    shared, ranks = e.replicas * e.tp, cfg.parallel.world_size or 1
    may_share_gpus = e.kind == "sglang" and cfg.cluster.device != "cpu" and cfg.cluster.placement == "colocated"
    without = "(or cluster.device=cpu on a machine without GPUs)"
    if e.weight_transport == "broadcast" and may_share_gpus:
        yield (
            "engine.weight_transport=broadcast with cluster.placement=colocated: NCCL admits no two ranks on one "
            f"device; use weight_transport=ipc or auto {without}"
        )
    if e.weight_transport == "ipc" and may_share_gpus and shared > ranks:
        yield (
            f"engine.weight_transport=ipc: engine.replicas={e.replicas} x engine.tp={e.tp} = {shared} devices are more "
            f"than the {ranks} of the trainer; lower one of them {without}"
        )
    if e.stage_in_memory and (e.weight_transport in ("broadcast", "ipc") or e.urls):
        other = "engine.urls" if e.urls else f"engine.weight_transport={e.weight_transport}"
        yield f"engine.stage_in_memory=true belongs to the disk transport of engines that the run starts, not {other}"
