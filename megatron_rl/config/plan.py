"""What a run will do, in numbers, before it does it: layout, batch, memory and bytes. Pure arithmetic, no processes.

Estimates count tensors that are certain to exist; allocator overhead and kernels' workspaces are not in them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from .algorithm import PRESETS
from .hf_config import HfConfig
from .schema import Config

GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """Rows of (what, value, how it comes about), grouped by heading."""

    sections: dict[str, list[tuple[str, str, str]]]


def make_plan(cfg: Config, hf: HfConfig) -> Plan:
    """Everything `--dry-run` prints."""
    return Plan(
        {
            "Layout": _layout(cfg, hf),
            "Algorithm": algorithm_rows(cfg),
            "Batch": _batch(cfg),
            "Memory per rank": _memory(cfg, hf),
            "Bytes per step": _bytes(cfg, hf),
        }
    )


def _layout(cfg: Config, hf: HfConfig) -> list[tuple[str, str, str]]:
    p = cfg.parallel
    tp, pp, dp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.data_parallel_size
    vpp = p.virtual_pipeline_model_parallel_size or 1
    rows = [
        ("model", f"{hf.model_type}, {hf.num_parameters:,} parameters", f"{hf.num_layers} layers, {cfg.model.dtype}"),
        ("trainer ranks", str(p.world_size), f"TP {tp} x PP {pp} x CP {p.context_parallel_size} x DP {dp}"),
        ("layers per rank", str(hf.num_layers // pp), f"{vpp} chunk(s) of {hf.num_layers // pp // vpp}"),
    ]
    rows += [
        (f"replica {d} stage {s}", "ranks " + ", ".join(str(s * dp * tp + d * tp + t) for t in range(tp)), "")
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


def algorithm_rows(cfg: Config) -> list[tuple[str, str, str]]:
    """Every key of `algorithm:` as it was resolved, and who said so; then what presets bring to `rollout:`."""
    a, preset = cfg.algorithm, PRESETS[cfg.algorithm.preset]
    rows: list[tuple[str, str, str]] = [("preset", a.preset, "")]
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


def _batch(cfg: Config) -> list[tuple[str, str, str]]:
    r, a = cfg.rollout, cfg.algorithm
    cap = a.max_tokens_per_microbatch
    samples = r.groups_per_step * r.group_size
    longest = r.max_prompt_tokens + r.max_response_tokens
    return [
        ("samples per step", str(samples), f"{r.groups_per_step} groups x {r.group_size}"),
        ("tokens per step, at most", f"{samples * longest:,}", f"{longest} per sample"),
        ("updates per step", str(a.updates_per_batch), f"{samples // a.updates_per_batch} samples each"),
        ("micro-batches per update, at most", str(_most_microbatches(cfg)), f"{cap:,} tokens each, per rank"),
        ("steps", str(cfg.steps), f"{cfg.steps * samples:,} samples in all"),
    ]


def _most_microbatches(cfg: Config) -> int:
    """With every sample at its longest and all of them on their rank's share; see `policy/microbatch.py`.

    As many whole samples as fit go into one, so a cap that is no multiple of their length is not used up.
    """
    longest = cfg.rollout.max_prompt_tokens + cfg.rollout.max_response_tokens
    samples = cfg.rollout.groups_per_step * cfg.rollout.group_size // cfg.algorithm.updates_per_batch
    per_rank = samples // cfg.parallel.data_parallel_size
    count = math.ceil(per_rank / max(1, cfg.algorithm.max_tokens_per_microbatch // longest))
    multiple = cfg.parallel.microbatch_multiple
    return math.ceil(count / multiple) * multiple


def _memory(cfg: Config, hf: HfConfig) -> list[tuple[str, str, str]]:
    p = cfg.parallel
    width = 2 if cfg.model.dtype == "bfloat16" else 4
    held = hf.num_parameters / (p.tensor_model_parallel_size * p.pipeline_model_parallel_size)
    shards = p.data_parallel_size if p.use_distributed_optimizer else 1
    state = held * (12 if width == 2 else 8) / shards
    longest = cfg.rollout.max_prompt_tokens + cfg.rollout.max_response_tokens
    samples = cfg.rollout.groups_per_step * cfg.rollout.group_size
    tokens = min(cfg.algorithm.max_tokens_per_microbatch, samples * longest)
    chunk, chunks = min(cfg.loss.chunk_tokens, tokens), 2 if p.tensor_model_parallel_size > 1 else 1
    multiple = cfg.model.make_vocab_size_divisible_by
    columns = math.ceil(hf.vocab_size / p.tensor_model_parallel_size / multiple) * multiple
    rows = [
        ("parameters", _gib(held * width), f"{width} bytes each, over TP x PP"),
        ("gradients", _gib(held * 4), "fp32"),
        ("optimizer state", _gib(state), f"over {shards} data-parallel rank(s)"),
        (
            "logits at their peak",
            _gib(chunk * chunks * columns * 4),
            f"last stage: {chunks} chunk(s) of {chunk:,} tokens x {columns:,} columns, fp32",
        ),
    ]
    if cfg.algorithm.kl_coef:
        rows.append(("reference model (host)", _gib(held * width), "swapped in for its pass"))
    return rows


def _bytes(cfg: Config, hf: HfConfig) -> list[tuple[str, str, str]]:
    r = cfg.rollout
    samples = r.groups_per_step * r.group_size
    tokens = samples * (r.max_prompt_tokens + r.max_response_tokens)
    width = 2 if cfg.model.dtype == "bfloat16" else 4
    return [
        ("weights to each engine", _gib(hf.num_parameters * width), _TRANSPORTS[cfg.engine.weight_transport]),
        ("rollouts to the trainer", _gib(tokens * (8 + 4 + 1)), "token, log-prob and mask; at most"),
        ("one checkpoint", _gib(hf.num_parameters * (width + 12)), "model and optimizer"),
    ]


_TRANSPORTS = {
    "auto": "by engine.weight_transport=auto: see docs/weights.md",
    "disk": "through a version directory on disk",
    "broadcast": "through process groups of trainer and engines",
    "ipc": "through the memory of the devices they share",
}


def _gib(count: float) -> str:
    return f"{count / GIB:.3f} GiB" if count >= GIB / 1000 else f"{count / 2**20:.3f} MiB"
