"""Checks that a layout over ranks fits the model: heads, layers, experts, padded lengths. Sizes alone: `parallel`."""

from __future__ import annotations

from collections.abc import Iterator

from .hf_config import HfConfig
from .schema import Config
from .shards import divisors, stage_layers


def layout_problems(cfg: Config, hf: HfConfig) -> Iterator[str]:
    """What of section `parallel` does not fit the model or the lengths, each with key, value and what to do."""
    yield from _dense(cfg, hf)
    yield from _experts(cfg, hf)
    yield from _cap(cfg)
    yield from _context(cfg, hf)


def _dense(cfg: Config, hf: HfConfig) -> Iterator[str]:
    p = cfg.parallel
    tp = p.tensor_model_parallel_size
    for name, count in (("attention heads", hf.num_attention_heads), ("key/value heads", hf.num_query_groups)):
        if count % tp:
            yield (
                f"parallel.tensor_model_parallel_size={tp} does not divide the model's {count} {name}; "
                f"use one of {divisors(hf.num_attention_heads, hf.num_query_groups)}"
            )
    if hf.ffn_hidden_size % tp:
        yield f"parallel.tensor_model_parallel_size={tp} does not divide intermediate_size={hf.ffn_hidden_size}"
    if tp > 1 and not p.sequence_parallel and (hf.moe is not None or hf.mla is not None):
        why = (
            "experts would see every token once for each of these ranks"
            if hf.moe is not None
            else "each of these ranks would keep its own part only of the gradients of what latent attention shares"
        )
        yield (
            f"parallel.tensor_model_parallel_size={tp} with sequence_parallel=false: {why}; set "
            "parallel.sequence_parallel=true"
        )
    try:
        stage_layers(hf.num_layers, p)
    except ValueError as error:
        yield str(error)


def _experts(cfg: Config, hf: HfConfig) -> Iterator[str]:
    p = cfg.parallel
    ep, etp = p.expert_model_parallel_size, p.expert_tensor_parallel_size
    if hf.moe is None:
        for name, size in (("expert_model_parallel_size", ep), ("expert_tensor_parallel_size", etp)):
            if size > 1:
                yield f"parallel.{name}={size}: {hf.model_type} has no experts; leave it out"
        return
    if hf.moe.num_experts % ep:
        yield (
            f"parallel.expert_model_parallel_size={ep} does not divide the {hf.moe.num_experts} experts of a layer; "
            f"use one of {divisors(hf.moe.num_experts)}"
        )
    if hf.moe.ffn_hidden_size % etp:
        yield (
            f"parallel.expert_tensor_parallel_size={etp} does not divide the {hf.moe.ffn_hidden_size} features of an "
            f"expert; use one of {divisors(hf.moe.ffn_hidden_size)}"
        )
    if hf.moe.shared_ffn_hidden_size % p.tensor_model_parallel_size:
        yield (
            f"parallel.tensor_model_parallel_size={p.tensor_model_parallel_size} does not divide the "
            f"{hf.moe.shared_ffn_hidden_size} features of the shared experts; use a divisor"
        )


def _cap(cfg: Config) -> Iterator[str]:
    p, cap = cfg.parallel, cfg.algorithm.max_tokens_per_microbatch
    reasons = []
    if p.sequence_parallel:
        reasons.append(f"sequence_parallel over tensor_model_parallel_size={p.tensor_model_parallel_size}")
    if p.context_parallel_size > 1:
        reasons.append(f"2 chunks for each of context_parallel_size={p.context_parallel_size}")
    if cap % p.row_multiple:
        yield (
            f"algorithm.max_tokens_per_microbatch={cap}: micro-batches are padded to a multiple of {p.row_multiple} "
            f"({' and '.join(reasons)}), so the cap must be one; use {max(cap - cap % p.row_multiple, p.row_multiple)}"
        )


def _context(cfg: Config, hf: HfConfig) -> Iterator[str]:
    """Heads exchanged for tokens: each context-parallel rank gets its part of those of its tensor-parallel rank."""
    p = cfg.parallel
    if p.context_parallel_size == 1 or p.context_parallel_exchange != "a2a":
        return
    tp, cp = p.tensor_model_parallel_size, p.context_parallel_size
    groups = hf.num_attention_heads if hf.mla is not None else hf.num_query_groups
    for name, count in (("attention heads", hf.num_attention_heads), ("key/value heads", groups)):
        if count % (tp * cp):
            yield (
                f"parallel.context_parallel_exchange=a2a deals the model's {count} {name} over "
                f"tensor_model_parallel_size={tp} x context_parallel_size={cp} ranks, which do not divide them; use "
                f"p2p or all_gather, or sizes whose product is one of {divisors(hf.num_attention_heads, groups)}"
            )
            return
