"""Megatron parameter names <-> Hugging Face tensor names, from a family's table; reading and writing are elsewhere."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch.nn import Parameter

from megatron_rl.weights import WeightsError

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from torch import Tensor

    from megatron_rl.config import HfConfig
    from megatron_rl.weights.layouts import Layout

# Transformer Engine fuses a norm into the matrix behind it; tables use the names of the local layer spec.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LAYER_PREFIX = "model.layers.{layer}."
"""What precedes `Rule.hf` in layer rules; the number is the layer's in the whole model, from 0."""
# One module for each expert of this rank, or Transformer Engine's one module with a weight for each.
_EXPERTS = (
    re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<matrix>linear_fc[12])\.weight"),
    re.compile(r"mlp\.experts\.(?P<matrix>linear_fc[12])\.weight(?P<expert>\d+)"),
)


@dataclass(frozen=True)
class Rule:
    """One row of a family's table.

    Attributes:
        megatron: the parameter's name; in a layer rule, behind `decoder.layers.N.`.
        hf: the tensors it is made of, in the layout's order; in a layer rule, behind `model.layers.N.`. With
            `{expert}` in them the rule stands for every expert of the layer, each a parameter of its own.
        layout: how they are put together.
        shapes: of `hf`, one text each, of the words in `_dimensions`.
        when: name of the `HfConfig` field that must be true for the rule to apply; None = always.
        layers: in a layer rule, which layers have it.
        keeps_dtype: it is kept, and leaves, in its own dtype whatever the model's.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout
    shapes: tuple[str, ...]
    when: str | None = None
    layers: Literal["all", "dense", "moe"] = "all"
    keeps_dtype: bool = False

    @property
    def is_expert(self) -> bool:
        """Whether expert-parallel ranks hold different ones of it, and expert-tensor-parallel ranks parts of each."""
        return "{expert}" in self.hf[0]

    def applies(self, hf: HfConfig, layer: int | None = None) -> bool:
        """Whether the model has it, in `layer` (from 0) if it is a layer rule."""
        kinds = ("all", "moe" if layer in hf.moe_layers else "dense")
        return (self.when is None or bool(getattr(hf, self.when))) and self.layers in kinds


@dataclass(frozen=True)
class Row:
    """A parameter of the whole model: its rule, its layer (from 0; None outside of layers), its full tensor names, and
    which of the layer's experts it belongs to (None: it is no expert's)."""

    rule: Rule
    layer: int | None
    hf: tuple[str, ...]
    expert: int | None = None


def _dimensions(hf: HfConfig) -> dict[str, int]:
    """The words of `Rule.shapes`."""
    return {
        "vocab": hf.vocab_size,
        "hidden": hf.hidden_size,
        "ffn": hf.ffn_hidden_size,
        "queries": hf.num_attention_heads * hf.head_dim,
        "keys": hf.num_query_groups * hf.head_dim,
        "head": hf.head_dim,
        **_expert_dimensions(hf),
        **_latent_dimensions(hf),
    }


def _expert_dimensions(hf: HfConfig) -> dict[str, int]:
    if hf.moe is None:
        return {}
    return {
        "experts": hf.moe.num_experts,
        "expert_ffn": hf.moe.ffn_hidden_size,
        "shared_ffn": hf.moe.shared_ffn_hidden_size,
    }


def _latent_dimensions(hf: HfConfig) -> dict[str, int]:
    if hf.mla is None:
        return {}
    return {
        "q_rank": hf.mla.q_lora_rank or 0,
        "kv_rank": hf.mla.kv_lora_rank,
        "kv_down": hf.mla.kv_lora_rank + hf.mla.qk_rope_head_dim,
        "kv_up": hf.num_attention_heads * (hf.mla.qk_nope_head_dim + hf.mla.v_head_dim),
        "values": hf.num_attention_heads * hf.mla.v_head_dim,
    }


@dataclass(frozen=True)
class Family:
    """A model family's table.

    Attributes:
        model_type: as in config.json.
        top: rules outside of layers.
        layer: rules of every layer.
    """

    model_type: str
    top: tuple[Rule, ...]
    layer: tuple[Rule, ...]

    def hf_shapes(self, hf: HfConfig) -> dict[str, tuple[int, ...]]:
        """Every tensor that a checkpoint of this model must hold, with its shape, in the order of the network."""
        sizes = _dimensions(hf)
        return {
            name: tuple(sizes[word] for word in shape.split())
            for row in self.rows(hf)
            for name, shape in zip(row.hf, row.rule.shapes, strict=True)
        }

    def rows(self, hf: HfConfig) -> Iterator[Row]:
        """Every parameter of the whole model, in the order of the network; none for an output layer that is tied."""
        first, *last = (rule for rule in self.top if rule.applies(hf))
        yield Row(first, None, first.hf)
        for layer in range(hf.num_layers):
            rules = [rule for rule in self.layer if rule.applies(hf, layer)]
            for rule in rules:
                if not rule.is_expert:
                    yield Row(rule, layer, self.layer_names(rule, layer))
            for expert in range(hf.moe.num_experts if hf.moe else 0):
                for rule in rules:
                    if rule.is_expert:
                        yield Row(rule, layer, self.layer_names(rule, layer, expert), expert)
        for rule in last:
            if not (hf.tie_word_embeddings and rule.megatron == OUTPUT_LAYER):
                yield Row(rule, None, rule.hf)

    def layer_names(self, rule: Rule, layer: int, expert: int | None = None) -> tuple[str, ...]:
        """The tensors of a layer rule; `layer` and `expert` are numbers in the whole model, from 0."""
        prefix = _LAYER_PREFIX.format(layer=layer)
        return tuple(prefix + (name if expert is None else name.format(expert=expert)) for name in rule.hf)

    def ignores(self, name: str, hf: HfConfig) -> bool:
        """Whether a checkpoint may hold the tensor although the model does not need it."""
        further = range(hf.num_layers, hf.num_layers + hf.num_predicted_layers)
        return (
            name.endswith(".rotary_emb.inv_freq")
            or (hf.tie_word_embeddings and name in self.tied_names())
            or name.startswith(tuple(_LAYER_PREFIX.format(layer=layer) for layer in further))
        )

    def tied_names(self) -> set[str]:
        """Tensors that are another name of the embedding when embeddings are tied."""
        return {name for rule in self.top if rule.megatron == OUTPUT_LAYER for name in rule.hf}


EMBEDDING, OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class Mapped:
    """A parameter, or persistent buffer, of this rank, and what it is in Hugging Face terms."""

    name: str
    parameter: Tensor
    hf: tuple[str, ...]
    layout: Layout
    is_tied_copy: bool
    """The last pipeline stage's copy of a tied embedding: loaded, but exported by the first stage only."""
    expert: int | None = None
    """In the whole layer, from 0: its matrices are split over the expert-tensor-parallel ranks, and every
    expert-parallel rank holds others. None: it is no expert's."""
    template: tuple[str, ...] = ()
    """Of an expert: `hf` with `{expert}` in place of its number."""
    keeps_dtype: bool = False
    """It leaves in its own dtype, whatever that of the model."""

    def hf_of(self, expert: int) -> tuple[str, ...]:
        """The tensors that the same matrix of another expert of this layer is made of."""
        return tuple(name.format(expert=expert) for name in self.template)


def unwrap(chunk: Any) -> GPTModel:
    """The GPTModel inside data-parallel and mixed-precision wrappers."""
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module
    return chunk


def mapped_parameters(chunk: Any, family: Family, hf: HfConfig) -> Iterator[Mapped]:
    """Every parameter of a model chunk, wrapped or bare, with its Hugging Face names; then the buffers that have some.

    Raises:
        WeightsError: a parameter that the family's table does not know.
    """
    model = unwrap(chunk)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        match = _LAYER.fullmatch(name)
        if match is None:
            mapped = _top(name, tensor, family, hf)
        else:
            # Megatron numbers a chunk's own layers from 0; layer_number counts through the whole model, from 1.
            layer = model.decoder.layers[int(match[1])].layer_number - 1
            mapped = _in_layer(name, match[2], tensor, layer, family, hf)
        if mapped is not None:
            yield mapped
        elif isinstance(tensor, Parameter):
            raise WeightsError(
                f"Megatron parameter {name!r} has no row in the table of {family.model_type!r}: "
                f"add one to megatron_rl/weights/families/{family.model_type}.py"
            )


def _top(name: str, tensor: Tensor, family: Family, hf: HfConfig) -> Mapped | None:
    rules = {rule.megatron: rule for rule in family.top}
    if name not in rules:
        return None
    tied = hf.tie_word_embeddings and name == OUTPUT_LAYER
    source = rules[EMBEDDING] if tied else rules[name]
    return Mapped(name, tensor, source.hf, rules[name].layout, tied)


def _in_layer(name: str, suffix: str, tensor: Tensor, layer: int, family: Family, hf: HfConfig) -> Mapped | None:
    suffix, expert = FUSED_NORMS.get(suffix, suffix), None
    for pattern in _EXPERTS:
        if match := pattern.fullmatch(suffix):
            suffix, expert = f"mlp.experts.{match['matrix']}.weight", _first_expert(hf) + int(match["expert"])
    for rule in family.layer:
        if rule.megatron == suffix and rule.applies(hf, layer):
            template = family.layer_names(rule, layer)
            names = template if expert is None else family.layer_names(rule, layer, expert)
            return Mapped(name, tensor, names, rule.layout, False, expert, template, rule.keeps_dtype)
    return None


def _first_expert(hf: HfConfig) -> int:
    """Number in the whole layer of this rank's first expert."""
    from megatron.core import parallel_state

    assert hf.moe is not None
    ranks = parallel_state.get_expert_model_parallel_world_size() or 1  # 0 where there are no groups
    return int(parallel_state.get_expert_model_parallel_rank()) * (hf.moe.num_experts // ranks)
