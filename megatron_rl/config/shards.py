"""Which layers a pipeline stage has, and how many parameters one rank then holds; arithmetic on shapes, no Megatron.

`tools/plan_model.py` builds the same shards without memory and compares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .hf_config import HfConfig
from .model import ModelConfig
from .parallel import ParallelConfig


@dataclass(frozen=True)
class Shard:
    """Parameters of one rank, apart by who else has them: expert ones are copied over fewer ranks than the others."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


def stage_layers(num_layers: int, parallel: ParallelConfig) -> list[list[range]]:
    """Layers, from 0, of every chunk of every pipeline stage.

    First and last stage have as many as they are told to; the others share the rest evenly. With virtual stages every
    stage cuts its layers evenly, and the model runs through chunk 0 of all stages, then chunk 1, and so on.

    Raises:
        ValueError: the layers cannot be dealt like this; says which key to change.

    >>> stage_layers(6, ParallelConfig(pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=2))
    [[range(0, 2)], [range(2, 6)]]
    """
    stages, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    counts = _layer_counts(num_layers, stages, parallel)
    if uneven := [count for count in counts if count % chunks]:
        raise ValueError(
            f"parallel.virtual_pipeline_model_parallel_size={chunks} does not divide the {uneven[0]} layers of a "
            "pipeline stage; change it, or the number of layers of that stage"
        )
    table: list[list[range]] = [[] for _ in range(stages)]
    first = 0
    for _ in range(chunks):
        for stage, count in enumerate(counts):
            table[stage].append(range(first, first + count // chunks))
            first += count // chunks
    return table


def divisors(*numbers: int) -> list[int]:
    """What divides all of them."""
    return [d for d in range(1, min(numbers) + 1) if all(n % d == 0 for n in numbers)]


def _layer_counts(num_layers: int, stages: int, parallel: ParallelConfig) -> list[int]:
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    ends = (first or 0) + (last or 0)
    others = stages - (first is not None) - (last is not None)
    left = num_layers - ends
    if left < others or (others == 0 and left) or (others and left % others):
        uneven = "parallel.num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
        if ends:
            raise ValueError(
                f"{uneven} = {first}, {last} leave {left} of {num_layers} layers to {others} other pipeline stages; "
                "they must leave each the same number, at least 1"
            )
        raise ValueError(
            f"parallel.pipeline_model_parallel_size={stages} does not divide {num_layers} layers; use one of "
            f"{divisors(num_layers)}, or set {uneven}"
        )
    counts = [left // others if others else 0] * stages
    counts[0] = first if first is not None else counts[0]
    counts[-1] = last if last is not None else counts[-1]
    return counts


def shard(hf: HfConfig, model: ModelConfig, parallel: ParallelConfig, stage: int) -> Shard:
    """Parameters of any rank of pipeline stage `stage`: all of them hold equally many."""
    layers = [layer for chunk in stage_layers(hf.num_layers, parallel)[stage] for layer in chunk]
    tp, last = parallel.tensor_model_parallel_size, stage == parallel.pipeline_model_parallel_size - 1
    with_experts = set(hf.moe_layers)
    moe = [layer for layer in layers if layer in with_experts]
    dense = len(layers) * (_attention(hf, tp) + 2 * hf.hidden_size)
    dense += (len(layers) - len(moe)) * _gated_mlp(hf.hidden_size, hf.ffn_hidden_size, tp)
    expert = 0
    if hf.moe is not None:
        shared = _gated_mlp(hf.hidden_size, hf.moe.shared_ffn_hidden_size, tp)
        dense += len(moe) * (hf.moe.num_experts * hf.hidden_size + shared)
        own = hf.moe.num_experts // parallel.expert_model_parallel_size
        one = _gated_mlp(hf.hidden_size, hf.moe.ffn_hidden_size, parallel.expert_tensor_parallel_size)
        expert = len(moe) * own * one
    vocabulary = vocabulary_rows(hf, model, parallel) * hf.hidden_size
    # A tied output layer is the embedding itself, and a copy of it where it is another stage's.
    dense += vocabulary * ((stage == 0) + (last and not (hf.tie_word_embeddings and stage == 0)))
    return Shard(dense + (hf.hidden_size if last else 0), expert)


def vocabulary_rows(hf: HfConfig, model: ModelConfig, parallel: ParallelConfig) -> int:
    """Rows of the embedding on one tensor-parallel rank, padding included."""
    multiple, tp = model.make_vocab_size_divisible_by, parallel.tensor_model_parallel_size
    return math.ceil(hf.vocab_size / (multiple * tp)) * multiple


def _attention(hf: HfConfig, tp: int) -> int:
    """One layer's attention on one rank; what is normed or down-projected per token is there as a whole."""
    hidden, heads = hf.hidden_size, hf.num_attention_heads
    if hf.mla is None:
        bias = hf.qkv_rows if hf.qkv_bias else 0
        split = hidden * hf.qkv_rows + bias + heads * hf.head_dim * hidden
        return split // tp + (2 * hf.head_dim if hf.qk_norm else 0)
    m = hf.mla
    query = heads * (m.qk_nope_head_dim + m.qk_rope_head_dim)
    whole = hidden * (m.kv_lora_rank + m.qk_rope_head_dim) + m.kv_lora_rank
    split = m.kv_lora_rank * heads * (m.qk_nope_head_dim + m.v_head_dim) + heads * m.v_head_dim * hidden
    if m.q_lora_rank is None:
        return whole + (split + hidden * query) // tp
    return whole + hidden * m.q_lora_rank + m.q_lora_rank + (split + m.q_lora_rank * query) // tp


def _gated_mlp(hidden: int, ffn: int, ranks: int) -> int:
    return 3 * hidden * ffn // ranks


def num_parameters(hf: HfConfig) -> int:
    """Parameters of the whole model, without any padding."""
    unpadded = ModelConfig(path="", make_vocab_size_divisible_by=1)
    return shard(hf, unpadded, ParallelConfig(), 0).total
