"""What a run will do, in numbers, before it does it: layout, algorithm and batch. Pure arithmetic, no processes.

Memory and bytes are in `plan_memory`.
"""

from __future__ import annotations

import json

from .algorithm import PRESETS
from .hf_config import HfConfig
from .plan_memory import Row, byte_rows, expert_copies, memory_rows, most_microbatches
from .schema import Config
from .shards import num_parameters, stage_layers


def make_plan(cfg: Config, hf: HfConfig) -> dict[str, list[Row]]:
    """Everything `--dry-run` prints: rows of (what, value, how it comes about), by heading."""
    return {
        "Layout": _layout(cfg, hf),
        "Algorithm": algorithm_rows(cfg),
        "Batch": _batch(cfg),
        "Memory per rank": memory_rows(cfg, hf),
        "Bytes per step": byte_rows(cfg, hf),
    }


def _layout(cfg: Config, hf: HfConfig) -> list[Row]:
    p = cfg.parallel
    tp, pp, dp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.data_parallel_size
    vpp = p.virtual_pipeline_model_parallel_size or 1
    layers = [sum(map(len, chunks)) for chunks in stage_layers(hf.num_layers, p)]
    rows = [
        ("model", f"{hf.model_type}, {num_parameters(hf):,} parameters", f"{hf.num_layers} layers, {cfg.model.dtype}"),
        ("trainer ranks", str(p.world_size), f"TP {tp} x PP {pp} x CP {p.context_parallel_size} x DP {dp}"),
        ("layers per rank", ", ".join(map(str, layers)), f"of each stage, from stage 0 on, in {vpp} chunk(s)"),
    ]
    rows += _experts(cfg, hf)
    together = tp * p.context_parallel_size
    rows += [
        (f"replica {d} stage {s}", _ranks((s * dp + d) * together, together), "")
        for d in range(min(dp, 2))
        for s in range(min(pp, 4))
    ]
    engines = ", ".join(cfg.engine.urls) or f"{cfg.engine.replicas} x {cfg.engine.kind}"
    r = cfg.rollout
    partial = ", with partial rollouts" if r.partial_rollouts and r.mode != "async" else ""
    return [
        *rows,
        ("engines", engines, f"{cfg.engine.max_running_requests} sequences each, {cfg.cluster.placement}"),
        ("rollouts", r.mode + partial, f"tokens at most {r.max_staleness} versions old"),
    ]


def _ranks(first: int, count: int) -> str:
    last = first + count - 1
    return f"ranks {first} to {last}" if count > 2 else f"ranks {first}, {last}" if count == 2 else f"rank {first}"


def _experts(cfg: Config, hf: HfConfig) -> list[Row]:
    if hf.moe is None:
        return []
    p, m = cfg.parallel, hf.moe
    ep, etp = p.expert_model_parallel_size, p.expert_tensor_parallel_size
    replay = f"routing replay {cfg.moe.routing_replay}"
    return [
        ("experts", f"{m.num_experts} in {len(hf.moe_layers)} layers, {m.top_k} a token", replay),
        ("expert ranks", f"EP {ep} x ETP {etp}", f"{m.num_experts // ep} experts each, {expert_copies(cfg)} copies"),
    ]


def algorithm_rows(cfg: Config) -> list[Row]:
    """Every key of `algorithm:` as it was resolved, and who said so; then what presets bring to `rollout:`."""
    a, preset = cfg.algorithm, PRESETS[cfg.algorithm.preset]
    rows: list[Row] = [("preset", a.preset, "")]
    for key, field in type(a).model_fields.items():
        if key in ("preset", "max_tokens_per_microbatch", "updates_per_batch"):
            continue
        value = getattr(a, key)
        if key in preset:
            source = "preset" if value == preset[key] else f"given; the preset has {_plain(preset[key])}"
        elif key == "corrections" and value == ["tis"] and cfg.rollout.off_policy:
            source = "default for tokens of older weights"
        else:
            source = "default" if value == field.get_default(call_default_factory=True) else "given"
        rows.append((key, _plain(value), source))
    return [*rows, *((f"rollout.{key}", _plain(getattr(cfg.rollout, key)), "") for key in _BROUGHT)]


_BROUGHT = ("dynamic_sampling", "overlong_cache")
"""Keys of `rollout:` that a preset brings."""


def _plain(value: object) -> str:
    """As one would write it in YAML."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _batch(cfg: Config) -> list[Row]:
    r, a = cfg.rollout, cfg.algorithm
    cap = a.max_tokens_per_microbatch
    samples, longest = r.samples_per_step, r.longest_sequence
    return [
        ("samples per step", str(samples), f"{r.groups_per_step} groups x {r.group_size}"),
        ("tokens per step, at most", f"{samples * longest:,}", f"{longest} per sample"),
        ("updates per step", str(a.updates_per_batch), f"{samples // a.updates_per_batch} samples each"),
        ("micro-batches per update, at most", str(most_microbatches(cfg)), f"{cap:,} tokens each, per rank"),
        ("steps", str(cfg.steps), f"{cfg.steps * samples:,} samples in all"),
    ]
