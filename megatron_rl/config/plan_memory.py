"""What a run needs of each device, of the host and of the network, in bytes; arithmetic on shapes for `plan`.

Estimates count tensors that are certain to exist; allocator overhead and kernels' workspaces are not in them. Experts
are taken to be loaded evenly, attention to keep no scores (flash attention).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .hf_config import HfConfig
from .rollout import capacity_of
from .schema import Config
from .shards import Shard, num_parameters, shard, stage_layers, vocabulary_rows

GIB = 2**30
ROUTE_CPU_S = 2.6e-9
"""From an engine's answer through a file to a rank, CPU seconds for one expert of one token in one layer."""
Row = tuple[str, str, str]


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one trainer rank of a pipeline stage."""

    stage: int
    shard: Shard
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    in_flight: float
    """Micro-batches whose activations exist at a time."""
    logits: float
    buckets: float

    @property
    def peak(self) -> float:
        """In an update, or in a weight update after it."""
        held = self.parameters + self.gradients + self.optimizer
        return held + max(self.activations + self.logits, self.buckets)


def width_of(cfg: Config) -> int:
    """Bytes of a parameter and of an activation."""
    return 2 if cfg.model.dtype == "bfloat16" else 4


def most_microbatches(cfg: Config) -> int:
    """With every sample at its longest and all of them on their rank's share; see `policy/microbatch.py`.

    As many whole samples as fit go into one, so a cap that is no multiple of their length is not used up.
    """
    samples = cfg.rollout.samples_per_step // cfg.algorithm.updates_per_batch
    per_rank = samples // cfg.parallel.data_parallel_size
    fitting = max(1, cfg.algorithm.max_tokens_per_microbatch // cfg.rollout.longest_sequence)
    multiple = cfg.parallel.microbatch_multiple
    return math.ceil(math.ceil(per_rank / fitting) / multiple) * multiple


def expert_copies(cfg: Config) -> int:
    """Ranks that hold the same expert parameters."""
    p = cfg.parallel
    stage = p.tensor_model_parallel_size * p.context_parallel_size * p.data_parallel_size
    return stage // (p.expert_model_parallel_size * p.expert_tensor_parallel_size)


def stage_memory(cfg: Config, hf: HfConfig, stage: int) -> StageMemory:
    """The memory of any trainer rank of this pipeline stage."""
    p, width = cfg.parallel, width_of(cfg)
    held = shard(hf, cfg.model, p, stage)
    of_state = 12 if width == 2 else 8  # moments, and an fp32 copy of bf16 parameters
    copies = (p.data_parallel_size * p.context_parallel_size, expert_copies(cfg))
    dense, expert = copies if p.use_distributed_optimizer else (1, 1)
    is_last = stage == p.pipeline_model_parallel_size - 1
    in_flight = _in_flight(cfg, stage)
    return StageMemory(
        stage=stage,
        shard=held,
        parameters=held.total * width,
        gradients=held.total * 4,
        optimizer=of_state * (held.dense / dense + held.expert / expert),
        activations=_activations(cfg, hf, stage, in_flight),
        in_flight=in_flight,
        logits=_logits(cfg, hf)[0] if is_last else 0,
        buckets=min(2 * cfg.engine.bucket_mib * 2**20, 2 * held.total * width),
    )


def memory_rows(cfg: Config, hf: HfConfig) -> list[Row]:
    """The trainer rank that needs most, then the host and an engine."""
    p = cfg.parallel
    m = max((stage_memory(cfg, hf, stage) for stage in range(p.pipeline_model_parallel_size)), key=lambda m: m.peak)
    copies = p.data_parallel_size * p.context_parallel_size if p.use_distributed_optimizer else 1
    over = f"over {copies} rank(s)"
    if hf.moe is not None:
        over += f", of experts over {expert_copies(cfg) if p.use_distributed_optimizer else 1}"
    tokens = _tokens(cfg)
    kept = {"none": "kept", "selective": "kept but for attention", "full": "inputs of layers, and one layer"}[
        p.recompute
    ]
    logits, how = _logits(cfg, hf)
    rows = [
        ("fullest pipeline stage", f"stage {m.stage}", f"{m.shard.total:,} parameters, {m.shard.expert:,} of experts"),
        ("parameters", _size(m.parameters), f"{width_of(cfg)} bytes each"),
        ("gradients", _size(m.gradients), "fp32"),
        ("optimizer state", _size(m.optimizer), over),
        ("activations", _size(m.activations), f"{kept}; {m.in_flight:g} micro-batch(es) of {tokens:,} tokens each"),
        ("logits at their peak", _size(logits), how),
        ("weight update", _size(m.buckets), f"two buckets of {cfg.engine.bucket_mib} MiB, in place of activations"),
        ("together at the peak", _size(m.peak), _fits(m.peak, cfg)),
    ]
    return [*rows, *_host_rows(cfg, m), *_engine_rows(cfg, hf, m)]


def _fits(needed: float, cfg: Config) -> str:
    size = cfg.cluster.device_memory_gib
    if size is None:
        return "not compared: cluster.device_memory_gib is not set"
    share = needed / (size * GIB)
    return f"{share:.0%} of the {size:g} GiB of a device" + ("" if share <= 1 else ": DOES NOT FIT")


def _host_rows(cfg: Config, m: StageMemory) -> list[Row]:
    rows = []
    if cfg.algorithm.kl_coef:
        rows.append(("reference model (host)", _size(m.parameters), "of each rank; swapped in for its pass"))
    if cfg.cluster.placement == "colocated":
        rows.append(("training state (host)", _size(m.optimizer), "of each rank, in the engines' turn"))
    return rows


def engine_weights(cfg: Config, hf: HfConfig) -> float:
    """Bytes of the weights that an engine gets; those in fp8 but for embedding and output layer, scales not counted."""
    width = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}[cfg.engine.weights_dtype(cfg.model.dtype)]
    vocabulary = hf.vocab_size * hf.hidden_size * (1 if hf.tie_word_embeddings else 2)
    return num_parameters(hf) * width + (vocabulary if width == 1 else 0)


def _engine_rows(cfg: Config, hf: HfConfig, m: StageMemory) -> list[Row]:
    e = cfg.engine
    weights, width = engine_weights(cfg, hf) / e.tp, 4 if e.compute_dtype(cfg.model.dtype) == "float32" else 2
    cached: float
    if hf.mla is not None:
        cached = hf.mla.kv_lora_rank + hf.mla.qk_rope_head_dim  # one latent for all heads, on every device
    else:
        cached = 2 * hf.head_dim * max(1, hf.num_query_groups / e.tp)
    token = hf.num_layers * cached * width
    wanted = token * e.max_running_requests * cfg.rollout.longest_sequence
    rows = [
        ("engine: weights", _size(weights), f"on each of {e.tp} device(s)"),
        ("engine: KV cache", _size(wanted), f"if {e.max_running_requests} sequences were at their longest at once"),
    ]
    size = cfg.cluster.device_memory_gib
    if size is None or e.memory_fraction is None:
        return rows
    left = e.memory_fraction * size * GIB - weights
    if left <= 0:
        room = f"weights alone are more than memory_fraction={e.memory_fraction:g}: DOES NOT FIT"
    else:
        room = f"{left / token:,.0f} tokens, {left / token / cfg.rollout.longest_sequence:.0f} of the longest sequences"
    rows.append(("engine: room for KV cache", _size(max(left, 0)), room))
    if cfg.cluster.placement == "colocated":
        beside = m.parameters + e.memory_fraction * size * GIB
        rows.append(("engine: with the trainer's weights", _size(beside), _fits(beside, cfg)))
    return rows


def _tokens(cfg: Config) -> int:
    """Of a micro-batch on one rank; context-parallel ranks share them."""
    tokens = min(cfg.algorithm.max_tokens_per_microbatch, cfg.rollout.samples_per_step * cfg.rollout.longest_sequence)
    return math.ceil(tokens / cfg.parallel.context_parallel_size)


def _logits(cfg: Config, hf: HfConfig) -> tuple[float, str]:
    chunk, chunks = min(cfg.loss.chunk_tokens, _tokens(cfg)), 2 if cfg.parallel.tensor_model_parallel_size > 1 else 1
    columns = vocabulary_rows(hf, cfg.model, cfg.parallel)
    how = f"last stage: {chunks} chunk(s) of {chunk:,} tokens x {columns:,} columns, fp32"
    return chunk * chunks * columns * 4, how


def _in_flight(cfg: Config, stage: int) -> float:
    """Micro-batches that this stage has begun and not gone back through, at most: 1F1B, and its interleaved form."""
    p, count = cfg.parallel, most_microbatches(cfg)
    behind, chunks = p.pipeline_model_parallel_size - stage - 1, p.virtual_pipeline_model_parallel_size
    if chunks is None:
        return min(behind + 1, count)
    return min(2 * behind + (chunks - 1) * p.pipeline_model_parallel_size + 1, count * chunks) / chunks


def _activations(cfg: Config, hf: HfConfig, stage: int, in_flight: float) -> float:
    """Bytes kept for the backward pass; the stage's chunks are taken to be alike."""
    p = cfg.parallel
    layers = [layer for chunk in stage_layers(hf.num_layers, p)[stage] for layer in chunk]
    with_experts = set(hf.moe_layers)
    kept = [_layer_features(cfg, hf, layer in with_experts) for layer in layers]
    tokens, width = _tokens(cfg), width_of(cfg)
    if p.recompute == "full":
        return tokens * width * (len(kept) * _hidden(cfg, hf) * in_flight + max(kept, default=0))
    return tokens * width * sum(kept) * in_flight


def _hidden(cfg: Config, hf: HfConfig) -> float:
    """Features of a hidden state on one rank, of a token of its micro-batch."""
    p = cfg.parallel
    return hf.hidden_size / (p.tensor_model_parallel_size if p.sequence_parallel else 1)


def _layer_features(cfg: Config, hf: HfConfig, is_moe: bool) -> float:
    """Numbers that one layer keeps of a token: inputs of norms and of products, and of the gated activation."""
    tp, hidden = cfg.parallel.tensor_model_parallel_size, _hidden(cfg, hf)
    if hf.mla is None:
        queries_keys = hf.head_dim * (hf.num_attention_heads + hf.num_query_groups)
        outputs = hf.head_dim * hf.num_attention_heads
        rotated = queries_keys * (2 if hf.qk_norm else 1)
        attention = (hf.qkv_rows + rotated + outputs) / tp
    else:
        m = hf.mla
        latents = 2 * ((m.q_lora_rank or 0) + m.kv_lora_rank) + m.qk_rope_head_dim
        head = 2 * (m.qk_nope_head_dim + m.qk_rope_head_dim) + 2 * m.v_head_dim
        attention = latents + hf.num_attention_heads * head / tp
    norms = 4 * hidden
    if not is_moe or hf.moe is None:
        return norms + attention + 3 * hf.ffn_hidden_size / tp
    etp = cfg.parallel.expert_tensor_parallel_size
    copies = hf.moe.top_k / (tp if cfg.parallel.sequence_parallel else 1) * etp  # of a token, on this rank
    experts = copies * (hf.hidden_size + 3 * hf.moe.ffn_hidden_size / etp)
    return norms + attention + experts + 3 * hf.moe.shared_ffn_hidden_size / tp + 2 * hf.moe.num_experts


def byte_rows(cfg: Config, hf: HfConfig) -> list[Row]:
    """What moves in one step, and what a checkpoint takes."""
    tokens = cfg.rollout.samples_per_step * cfg.rollout.longest_sequence
    rows = [
        ("weights to each engine", _size(engine_weights(cfg, hf)), _TRANSPORTS[cfg.engine.weight_transport]),
        ("rollouts to the trainer", _size(tokens * (8 + 4 + 1)), "token, log-prob and mask; at most"),
    ]
    if hf.moe is not None and cfg.engine.routed_experts:
        rows += _route_rows(cfg, hf, tokens)
    return [*rows, ("one checkpoint", _size(num_parameters(hf) * (width_of(cfg) + 12)), "model and optimizer")]


def _route_rows(cfg: Config, hf: HfConfig, tokens: int) -> list[Row]:
    from megatron_rl.routes import RouteStore  # loads numpy, which no other setting needs

    assert hf.moe is not None
    with_experts, stages = set(hf.moe_layers), stage_layers(hf.num_layers, cfg.parallel)
    layers = len(with_experts)
    numbers = tokens * layers * hf.moe.top_k
    sent = tokens * hf.num_layers * hf.moe.top_k * 4 * 4 / 3  # layers without experts, too
    a_token = RouteStore("", layers, hf.moe.top_k, hf.moe.num_experts).bytes_per_token
    alive, saved, checkpoints = _groups_with_routes(cfg)
    group = cfg.rollout.group_size * cfg.rollout.longest_sequence * a_token
    most = max(sum(layer in with_experts for chunk in stage for layer in chunk) for stage in stages)
    p = cfg.parallel
    sharing = p.data_parallel_size * p.context_parallel_size
    read = tokens * a_token * most / layers / (sharing * (p.tensor_model_parallel_size if p.sequence_parallel else 1))
    return [
        ("routes from the engines", _size(sent), "int32 as base64 in their answers; at most"),
        (
            "routes on disk",
            _size((alive + checkpoints * saved) * group),
            f"at most: {a_token} bytes a token; {alive} groups alive, {saved} in each of {checkpoints} checkpoints",
        ),
        (
            "CPU time for routes",
            f"{numbers * ROUTE_CPU_S:,.1f} s",
            f"of all client workers and readers; {ROUTE_CPU_S * 1e9:g} ns a number: tools/bench_routes.py",
        ),
        ("routes read by a trainer rank", _size(read), f"its {most} layers of its tokens; read again in the update"),
    ]


def _groups_with_routes(cfg: Config) -> tuple[int, int, int]:
    """Groups alive at once, those of them that a checkpoint takes along, and checkpoints kept.

    A run that never halts fills the places of what was trained on before it is saved.
    """
    r, kept = cfg.rollout, cfg.checkpoint
    alive = capacity_of(r.groups_per_step, r.oversample, r.max_staleness)
    return alive, alive if r.off_policy else alive - r.groups_per_step, kept.keep_last + kept.keep_best


_TRANSPORTS = {
    "auto": "by engine.weight_transport=auto: see docs/weights.md",
    "disk": "through a version directory on disk",
    "broadcast": "through process groups of trainer and engines",
    "ipc": "through the memory of the devices they share",
}


def _size(count: float) -> str:
    if count >= 1024 * GIB:
        return f"{count / 1024 / GIB:.3f} TiB"
    return f"{count / GIB:.3f} GiB" if count >= GIB / 1000 else f"{count / 2**20:.3f} MiB"
