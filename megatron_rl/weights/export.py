"""Streams Megatron weights as Hugging Face tensors, one parameter at a time; writing or sending them is elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_rl.weights.families import family_of
from megatron_rl.weights.mapping import mapped_parameters

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.config import HfConfig


def export_hf_weights(chunks: Sequence[Any], hf: HfConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) for every parameter of this rank's pipeline stage.

    Collective over the tensor-parallel group, and over it only: all its ranks must run the generator to its end, and
    each gets the same tensors, in the model's dtype and on its device. Pipeline stages yield their own layers; of tied
    embeddings only the first stage's is yielded, as `model.embed_tokens.weight`. Tensors may share memory with
    parameters: use or copy them before the next optimizer step.
    """
    from megatron.core import parallel_state

    family, group = family_of(hf), parallel_state.get_tensor_model_parallel_group()
    for chunk in chunks:
        for mapped in mapped_parameters(chunk, family, hf):
            if mapped.is_tied_copy:
                continue
            # Not a decorator: a generator would keep gradients off in the code that consumes it, too.
            with torch.no_grad():
                parameter = mapped.parameter.detach()
                shards = _gather(parameter, group) if mapped.layout.is_split else [parameter]
                tensors = mapped.layout.full(shards, hf)
            yield from zip(mapped.hf, tensors, strict=True)


def _gather(parameter: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    size = dist.get_world_size(group)
    if size == 1:
        return [parameter]
    gathered = parameter.new_empty((size * parameter.shape[0], *parameter.shape[1:]))
    dist.all_gather_into_tensor(gathered, parameter.contiguous(), group=group)
    return list(gathered.chunk(size))
