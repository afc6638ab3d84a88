"""Which settings of routing fit the model and the rest of the configuration; layouts of experts are not judged here."""

from __future__ import annotations

from collections.abc import Iterator

from .hf_config import HfConfig
from .schema import Config


def routing_problems(cfg: Config, hf: HfConfig) -> Iterator[str]:
    """Complaints, each with the fix."""
    if hf.moe is None:
        yield from _of_dense_models(cfg)
        return
    if cfg.engine.kind == "sglang":
        yield from _unlike_in_sglang(hf)
    replay, old = cfg.moe.routing_replay, cfg.algorithm.old_logprobs
    if replay == "R3" and not cfg.engine.routed_experts:
        yield (
            "moe.routing_replay=R3 replays what the engines report, and engine.routed_experts=false: set "
            "engine.routed_experts=true (engines of engine.urls: start them with --enable-return-routed-experts), or "
            "use routing_replay=R2"
        )
    if replay == "R2" and old != "recompute":
        yield (
            f"moe.routing_replay=R2 replays the pass for old log-probs, and algorithm.old_logprobs={old} has none; use "
            "old_logprobs=recompute, or routing_replay=R3"
        )
    limit = cfg.moe.max_routing_mismatch
    if limit is not None and not cfg.engine.routed_experts:
        yield (
            f"moe.max_routing_mismatch={limit} compares with the experts that the engines report, and "
            "engine.routed_experts=false; set it to true, or leave max_routing_mismatch out"
        )
    if limit is not None and old != "recompute":
        yield (
            f"moe.max_routing_mismatch={limit} is measured in the pass for old log-probs, and "
            f"algorithm.old_logprobs={old} has none; use old_logprobs=recompute, or leave max_routing_mismatch out"
        )


def _unlike_in_sglang(hf: HfConfig) -> Iterator[str]:
    """What SGLang 0.5.23 leaves unread in config.json of this family, and would compute otherwise."""
    if hf.moe is None or hf.model_type not in ("qwen3_moe", "glm4_moe"):
        return
    unread = {"tie_word_embeddings": hf.tie_word_embeddings}
    if hf.model_type == "qwen3_moe":
        unread["mlp_only_layers"] = bool(hf.moe.dense_layers)
    for key, meant in unread.items():
        if meant:
            yield (
                f"engine.kind=sglang does not heed {key} in config.json of a {hf.model_type} model and would sample "
                "from another one; use engine.kind=embedded, or a model without it"
            )


def _of_dense_models(cfg: Config) -> Iterator[str]:
    settings = {
        "moe.routing_replay": None if cfg.moe.routing_replay == "off" else cfg.moe.routing_replay,
        "moe.max_routing_mismatch": cfg.moe.max_routing_mismatch,
        "engine.routed_experts": "true" if cfg.engine.routed_experts else None,
    }
    for key, value in settings.items():
        if value is not None:
            yield f"{key}={value}: the model of model.path has no experts; leave it out"
