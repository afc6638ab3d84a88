"""Megatron's GPTModel, but its last stage hands on hidden states: no logits of a whole micro-batch exist; no loss here.

What is made of the hidden states and the output weight is in `forward.py`.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor


class PolicyModel(GPTModel):
    """Its last stage returns [1, T, H] (with sequence parallelism [1, T / TP, H]).

    Blocks for multi-token prediction are not run.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:
            assert type(self.output_layer) is ColumnParallelLinear
            # GPTModel takes no class for it. Parameters, hooks and checkpoint entries stay what they are.
            self.output_layer.__class__ = _HandsOn

    @property
    def output_weight(self) -> Tensor:
        """[V / TP, H]: the output layer's own, or the embedding's when they are tied. Last stage only."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        handed_on, _ = self.output_layer(hidden_states)
        return handed_on.transpose(0, 1).contiguous()


class _HandsOn(ColumnParallelLinear):
    """The output layer, not multiplying. Megatron still calls it, so whoever waits for its weights is called, too."""

    def forward(self, input_: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return input_, None
