"""Megatron parameter names <-> Hugging Face tensor names, from a family's table; reading and writing are elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Rule:
    """One row of a family's table.

    Attributes:
        megatron: the parameter's name; in a layer rule, behind `decoder.layers.N.`.
        hf: the tensors it is made of, in the layout's order; in a layer rule, behind the family's layer prefix.
        layout: how they are put together.
        shapes: of `hf`, one text each, of the words in `_dimensions`.
        when: name of the `HfConfig` field that must be true for the rule to apply; None = always.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout
    shapes: tuple[str, ...]
    when: str | None = None

    def applies(self, hf: HfConfig) -> bool:
        return self.when is None or bool(getattr(hf, self.when))


@dataclass(frozen=True)
class Row:
    """A parameter of the whole model: its rule, its layer (from 0; None outside of layers), its full tensor names."""

    rule: Rule
    layer: int | None
    hf: tuple[str, ...]


def _dimensions(hf: HfConfig) -> dict[str, int]:
    """The words of `Rule.shapes`."""
    return {
        "vocab": hf.vocab_size,
        "hidden": hf.hidden_size,
        "ffn": hf.ffn_hidden_size,
        "queries": hf.num_attention_heads * hf.head_dim,
        "keys": hf.num_query_groups * hf.head_dim,
        "head": hf.head_dim,
    }


@dataclass(frozen=True)
class Family:
    """A model family's table.

    Attributes:
        model_type: as in config.json.
        top: rules outside of layers.
        layer: rules of every layer.
        layer_prefix: what precedes `Rule.hf` in layer rules; `{layer}` is the global layer index, from 0.
        ignored: regular expression of tensors that checkpoints may hold and the model does not need.
    """

    model_type: str
    top: tuple[Rule, ...]
    layer: tuple[Rule, ...]
    layer_prefix: str = "model.layers.{layer}."
    ignored: str = r".*\.rotary_emb\.inv_freq"

    def hf_names(self, hf: HfConfig) -> set[str]:
        """Every tensor that a checkpoint of this model must hold."""
        return set(self.hf_shapes(hf))

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
            prefix = self.layer_prefix.format(layer=layer)
            for rule in self.layer:
                if rule.applies(hf):
                    yield Row(rule, layer, tuple(prefix + name for name in rule.hf))
        for rule in last:
            if not (hf.tie_word_embeddings and rule.megatron == OUTPUT_LAYER):
                yield Row(rule, None, rule.hf)

    def ignores(self, name: str, hf: HfConfig) -> bool:
        """Whether a checkpoint may hold the tensor although the model does not need it."""
        return re.fullmatch(self.ignored, name) is not None or (hf.tie_word_embeddings and name in self.tied_names())

    def tied_names(self) -> set[str]:
        """Tensors that are another name of the embedding when embeddings are tied."""
        return {name for rule in self.top if rule.megatron == OUTPUT_LAYER for name in rule.hf}


EMBEDDING, OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class Mapped:
    """A parameter of this rank, and what it is in Hugging Face terms."""

    name: str
    parameter: Tensor
    hf: tuple[str, ...]
    layout: Layout
    is_tied_copy: bool
    """The last pipeline stage's copy of a tied embedding: loaded, but exported by the first stage only."""


def unwrap(chunk: Any) -> GPTModel:
    """The GPTModel inside data-parallel and mixed-precision wrappers."""
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module
    return chunk


def mapped_parameters(chunk: Any, family: Family, hf: HfConfig) -> Iterator[Mapped]:
    """Every parameter of a model chunk, wrapped or bare, with its Hugging Face names.

    Raises:
        WeightsError: a parameter that the family's table does not know.
    """
    model = unwrap(chunk)
    top = {rule.megatron: rule for rule in family.top}
    layer_rules = {rule.megatron: rule for rule in family.layer}
    for name, parameter in model.named_parameters():
        match = _LAYER.fullmatch(name)
        if match is None:
            rule, prefix = top.get(name), ""
        else:
            suffix = FUSED_NORMS.get(match[2], match[2])
            rule = layer_rules.get(suffix)
            # Megatron numbers a chunk's own layers from 0; layer_number counts through the whole model, from 1.
            prefix = family.layer_prefix.format(layer=model.decoder.layers[int(match[1])].layer_number - 1)
        if rule is None:
            raise WeightsError(
                f"Megatron parameter {name!r} has no row in the table of {family.model_type!r}: "
                f"add one to megatron_rl/weights/families/{family.model_type}.py"
            )
        tied = hf.tie_word_embeddings and name == OUTPUT_LAYER
        source = top[EMBEDDING] if tied else rule
        yield Mapped(name, parameter, tuple(prefix + part for part in source.hf), rule.layout, tied)
