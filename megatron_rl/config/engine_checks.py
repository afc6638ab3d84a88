"""Which models the engines of section `engine` can serve, and laid out how; what they compute is not judged here.

What is asked of SGLang's layouts was read in the sources of 0.5.23, which says the same after minutes of loading.
"""

from __future__ import annotations

from collections.abc import Iterator

from .hf_config import EMBEDDED_MODEL_TYPES, HfConfig
from .quantised import BLOCK
from .schema import Config
from .shards import divisors

_ATTENTION_APART = ("--attn-dp", "--attn-cp", "--attention-data", "--attention-context", "--enable-dp-attention")
_WHOLE_SHARED_EXPERTS = ("--moe-a2a-backend",)
"""SGLang's options with which attention has a layout of its own, or every device all of those experts."""
_DENSE_APART = (*_ATTENTION_APART, "--moe-dense-tp")
"""Those with which MLPs have one of their own."""


def engine_problems(cfg: Config, hf: HfConfig) -> Iterator[str]:
    """Complaints about engines that the run starts, each with the fix; those of engine.urls have their own settings."""
    if cfg.engine.urls:
        return
    if cfg.engine.kind == "embedded":
        if hf.model_type not in EMBEDDED_MODEL_TYPES:
            yield (
                f"engine.kind=embedded does not serve model_type={hf.model_type} of model.path, only "
                f"{', '.join(EMBEDDED_MODEL_TYPES)}; use engine.kind=sglang"
            )
        return
    yield from _experts(cfg, hf)
    yield from _heads(cfg, hf)
    yield from _blocks(cfg, hf) if cfg.engine.dtype == "float8" else _dense(cfg, hf)


def _experts(cfg: Config, hf: HfConfig) -> Iterator[str]:
    """Each of `tp` devices has its part of the experts of one of `ep` groups: tp / ep devices share each expert."""
    tp, ep = cfg.engine.tp, cfg.engine.ep
    if hf.moe is None:
        if ep > 1:
            yield f"engine.ep={ep}: the model of model.path has no experts; leave it out"
        return
    sizes = divisors(tp, hf.moe.num_experts)
    if ep not in sizes:
        yield (
            f"engine.ep={ep} must divide engine.tp={tp}, whose devices SGLang deals the experts over, and the "
            f"{hf.moe.num_experts} experts of a layer; use one of {sizes}"
        )
    elif hf.moe.ffn_hidden_size * ep % tp:
        features = hf.moe.ffn_hidden_size
        fewer = [n for n in range(ep, tp, ep) if features * ep % n == 0 and _share_heads(n, cfg, hf)]
        ways = [f"engine.ep={n}" for n in sizes[-1:] if features * n % tp == 0]
        ways += [f"engine.tp={n}" for n in fewer[-1:]] or ["an engine.tp that divides them and the heads of attention"]
        yield (
            f"engine.tp={tp}, engine.ep={ep}: {tp // ep} devices cannot share the {features} features "
            f"of an expert evenly; use {' or '.join(ways)}"
        )


def _heads(cfg: Config, hf: HfConfig) -> Iterator[str]:
    """Each device has whole heads of attention; of keys and values it may have one that others have too."""
    tp, heads = cfg.engine.tp, hf.num_attention_heads
    if not _share_heads(tp, cfg, hf):
        yield (
            f"engine.tp={tp}: so many devices cannot share the {heads} attention heads, and {hf.num_query_groups} of "
            f"keys and values, of model.path; use one of {[n for n in divisors(heads) if _share_heads(n, cfg, hf)]}"
        )


def _share_heads(devices: int, cfg: Config, hf: HfConfig) -> bool:
    groups = hf.num_query_groups
    whole = hf.mla is not None or groups % devices == 0 or devices % groups == 0
    return _says(cfg, _ATTENTION_APART) or (hf.num_attention_heads % devices == 0 and whole)


def _dense(cfg: Config, hf: HfConfig) -> Iterator[str]:
    tp = cfg.engine.tp
    if len(hf.moe_layers) == hf.num_layers or _says(cfg, _DENSE_APART) or not _share_heads(tp, cfg, hf):
        return
    if hf.ffn_hidden_size % tp:
        yield (
            f"engine.tp={tp}: so many devices cannot share the {hf.ffn_hidden_size} features of an MLP of model.path "
            "evenly; use an engine.tp that divides them"
        )


def _blocks(cfg: Config, hf: HfConfig) -> Iterator[str]:
    """A block of fp8 numbers has one scale, so devices share matrices in whole blocks."""
    tp, ep = cfg.engine.tp, cfg.engine.ep
    shared = []
    if len(hf.moe_layers) < hf.num_layers:
        shared.append(("an MLP", hf.ffn_hidden_size, "engine.tp", tp, "a smaller engine.tp"))
    if hf.moe is not None:
        shared.append(
            ("an expert", hf.moe.ffn_hidden_size, "engine.tp / engine.ep", max(1, tp // ep), "a larger engine.ep")
        )
        if ep > 1 and not _says(cfg, _WHOLE_SHARED_EXPERTS):  # with ep = 1 they are cut as the others are
            features = hf.moe.shared_ffn_hidden_size
            shared.append(("the experts that see every token", features, "engine.tp", tp, "a smaller engine.tp"))
    if not _says(cfg, _ATTENTION_APART):
        shared += [(what, features, "engine.tp", tp, "a smaller engine.tp") for what, features in _attention(hf, tp)]
    for what, features, key, devices, instead in shared:
        if features % (devices * BLOCK[0]):
            yield (
                f"engine.dtype=float8 with {key}={devices}: each device must get a multiple of {BLOCK[0]} of the "
                f"{features} features of {what}; use {instead}, or weights in bf16 and engine.dtype=bfloat16"
            )


def _attention(hf: HfConfig, tp: int) -> Iterator[tuple[str, int]]:
    """What comes out of, or goes into, projections that `tp` devices share, and its features."""
    heads, groups, mla = hf.num_attention_heads, hf.num_query_groups, hf.mla
    if mla is None:
        # In one matrix with queries and values, so that also a single device needs a border of blocks between them.
        # A device has a multiple of that many queries.
        yield "the keys of attention, copies included", max(groups, tp) * hf.head_dim
    elif tp > 1:
        yield "the queries of attention", heads * mla.qk_head_dim
        yield "the keys and values of attention", heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        yield "the heads' values", heads * mla.v_head_dim


def _says(cfg: Config, options: tuple[str, ...]) -> bool:
    return any(word.startswith(options) for word in cfg.engine.extra_args)
