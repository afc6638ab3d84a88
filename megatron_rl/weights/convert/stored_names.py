"""How a parameter of the whole model is called in Megatron's distributed checkpoints, and which part of a tensor it is.

    decoder.layers.NAME        all layers alike: the layer is the tensor's first dimension
    decoder.layers.N.NAME      layers differ (some have experts, some have not): each layer by its number, from 0
    ...mlp.experts.experts...  experts are one dimension more, behind that of the layers if there is one; Megatron
                               stores its sequential, grouped and Transformer Engine's grouped experts alike

Norms are named as Transformer Engine fuses them into the matrix behind them. Its layers of latent attention and of
experts have norms of their own where others have fused ones, and so the name depends on the layer.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from megatron_rl.weights.mapping import FUSED_NORMS, Row

if TYPE_CHECKING:
    from megatron_rl.config import HfConfig

LAYERS = "decoder.layers."
_IN_LAYER = re.compile(r"decoder\.layers\.(?:\d+\.)?(.+)")
_STORED = {local: stored for stored, local in FUSED_NORMS.items()}
_EXPERTS = "mlp.experts.experts."


class Parameter(NamedTuple):
    """A parameter by its table's name: of which layer and which expert, from 0 (None: of none)."""

    name: str
    layer: int | None
    expert: int | None


def are_alike(hf: HfConfig) -> bool:
    """Whether all layers have the same parameters, and are stored as one tensor each."""
    return hf.moe is None or not hf.moe.dense_layers


def stored_at(row: Row, hf: HfConfig) -> tuple[str, tuple[int, ...]]:
    """Where a checkpoint has the parameter: a tensor's name, and the index in its leading dimensions."""
    name, index = row.rule.megatron, () if row.expert is None else (row.expert,)
    if row.layer is None:
        return name, index
    name = _stored_suffix(name, row.layer, hf)
    if are_alike(hf):
        return LAYERS + name, (row.layer, *index)
    return f"{LAYERS}{row.layer}.{name}", index


def _stored_suffix(name: str, layer: int, hf: HfConfig) -> str:
    with_own_norm = {"pre_mlp_layernorm.weight"} if layer in hf.moe_layers else set()
    # A norm of each head is the attention's own; that of a latent is fused with the projection behind it.
    with_own_norm |= {"self_attention.q_layernorm.weight"} if hf.mla is None else {"input_layernorm.weight"}
    stored = name if name in with_own_norm else _STORED.get(name, name)
    return stored.replace("mlp.experts.", _EXPERTS)


def parameter_at(name: str, index: tuple[int, ...]) -> Parameter:
    """Which parameter lies there; fused and separate norms are the same one."""
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return Parameter(name, None, None)
    suffix = FUSED_NORMS.get(match[1], match[1]).replace(_EXPERTS, "mlp.experts.")
    return Parameter(suffix, layer_at(name, index), expert_at(name, index))


def without_number(name: str) -> str:
    """The same name for all layers, also behind an optimizer's prefix."""
    return re.sub(r"decoder\.layers\.\d+\.", LAYERS, name)


def layer_at(name: str, index: tuple[int, ...]) -> int | None:
    """The layer of a part of a tensor, of the model's or the optimizer's."""
    if match := re.search(r"decoder\.layers\.(\d+)\.", name):
        return int(match[1])
    return index[0] if LAYERS in name and index else None


def expert_at(name: str, index: tuple[int, ...]) -> int | None:
    """The expert, likewise."""
    return index[-1] if f".{_EXPERTS}" in name and index else None
